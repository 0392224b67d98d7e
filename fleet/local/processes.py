"""Local processes: runs the processes of a cluster on this machine, as the supervision machine decides.

Rules:

1. Each child leads its own session and process group. So Ctrl-C in a terminal reaches only the supervisor, and
   everything that a child has started can be ended with it. A child has ended when its whole group has.
2. Nothing outlives the supervisor. The kernel kills the children (`process_group.die_with_parent`); an orphan reaper
   ends what they had started and removes the runtime folder. If both are killed, the next run cleans up
   (`fleet.local.runs`). A reaper that is killed alone is replaced, and it reports a supervisor that hangs.
3. All files of a child are in the runtime folder: settings, socket, temporary files, and the log, unless logs are kept
   elsewhere.
4. A child is ready when it has written one line of JSON, its endpoints, to its readiness file descriptor.
5. Every child is sampled twice a second. A hung one (`fleet.local.liveness`) is killed, which counts as a death.
6. The states of the children are recorded in the runtime folder for other commands (`fleet.local.runs`).
"""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import assert_never

import msgspec
from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.local.heartbeat import sample_process
from fleet.local.liveness import SAMPLE_INTERVAL, Liveness, LivenessLimits
from fleet.local.process_group import end_group, kill_group
from fleet.local.reaper_process import ReaperProcess
from fleet.local.runs import TEMPORARY, ProcessReport, note_logs, note_parts
from fleet.local.supervision import (
    CONFIGURATION_REFUSED,
    LONGEST_BACKOFF,
    AnnounceReady,
    AskToDrain,
    AskToStop,
    ChildAdded,
    ChildExited,
    ChildProcess,
    ChildReady,
    ChildRemoved,
    ChildState,
    ChildUnresponsive,
    ForgetChild,
    KillChild,
    ReportFailure,
    ReportRestart,
    SpawnChild,
    StopRequested,
    Supervision,
    SupervisionCommand,
    SupervisionEvent,
    SupervisionFinished,
    SupervisionTicked,
)

LOG_TAIL_LINES = 20
SHOWN_DEATHS = 3  # For this many deaths in a row, the end of the log is shown; later deaths rarely show anything new.
FIRST_PROGRESS = 5.0  # seconds until the first message while children load; the pauses double
PROGRESS_EVERY = 40.0  # longest pause between two messages, in seconds
SPAWN_FAILED = 127  # exit status of a child that could not be started, as in shells

ChildEndpoints = Mapping[str, str]
"""Addresses of a child, by protocol."""

Drain = Callable[[ChildEndpoints, Nanos], Awaitable[bool]]
"""Asks a child to drain within a time and to end; returns False if the child could not be asked."""


class LocalProcess(Struct, frozen=True, kw_only=True):
    """A child: its name, its command and its limits."""

    child: ChildProcess
    command: tuple[
        str, ...
    ]  # ``--ready-fd N --parent PID`` is appended, and ``--heartbeat`` before them if the child sends heartbeats
    limits: LivenessLimits = LivenessLimits()


class ClusterFailed(Exception):
    """The cluster ended without a request; the message is for a person, and the end of the log has been shown."""


class LocalProcesses:
    """The children of a cluster; `hold` runs them.

    Args:
        processes: What to run.
        folder: The runtime folder; temporary files of the children go there.
        logs: Folder of the children's logs; they are appended to.
        environment: Variables of the children.
        clock: The clock.
        say: Shows one line to a person.
        drain: Asks a removed child to drain; without it, or if it fails, the child is stopped.
        longest_pause: Longest pause before a child that keeps dying is restarted.
    """

    def __init__(
        self,
        processes: Sequence[LocalProcess],
        *,
        folder: Path,
        logs: Path,
        environment: Mapping[str, str],
        clock: Clock,
        say: Callable[[str], None],
        drain: Drain | None = None,
        longest_pause: Nanos = LONGEST_BACKOFF,
    ):
        self._processes = {process.child.name: process for process in processes}
        self._folder = folder
        self._logs = logs
        self._environment = {**environment, "TMPDIR": str(folder / TEMPORARY)}
        self._clock = clock
        self._say = say
        self._drain = drain
        self._machine = Supervision([process.child for process in processes], Random(), longest_pause)
        self._events: asyncio.Queue[SupervisionEvent] = asyncio.Queue()  # unbounded, because children cause few events
        self._running: dict[str, Process] = {}
        self._noted: Mapping[str, ProcessReport] = {}
        self._unsent: dict[str, signal.Signals] = {}  # signals for children that are still being started
        self._endpoints: dict[str, ChildEndpoints] = {}
        self._ready = asyncio.Event()
        self._stop_asked = False
        self._content: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._reaper = ReaperProcess(folder, self._environment, clock, say)

    @property
    def endpoints(self) -> Mapping[str, ChildEndpoints]:
        """Endpoints by child; complete when the cluster is ready."""
        return self._endpoints

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running children, by name."""
        return {name: process.pid for name, process in self._running.items()}

    @property
    def names(self) -> frozenset[str]:
        """Names of all children, including those that are ending."""
        return frozenset(self._processes)

    def child_states(self) -> Mapping[str, ChildState]:
        """Return the states by name, without children that were added a moment ago."""
        return self._machine.child_states()

    def failing(self) -> frozenset[str]:
        """Return the children that repeatedly fail to become ready."""
        return self._machine.failing()

    def add(self, process: LocalProcess) -> None:
        """Add a child while the body runs; its name must be free."""
        assert process.child.name not in self._processes, process.child.name
        self._processes[process.child.name] = process
        self._events.put_nowait(ChildAdded(process.child))

    def remove(self, name: str, within: Nanos) -> None:
        """Ask a child to drain and end within a time. It has ended when `names` does not contain it any more."""
        self._events.put_nowait(ChildRemoved(name, within))

    def request_stop(self) -> None:
        """Ask all children to end; the second call kills them."""
        self._stop_asked = True
        self._events.put_nowait(StopRequested())
        if self._content is not None:
            self._content.cancel()

    async def hold(self, body: Callable[[], Awaitable[None]]) -> bool:
        """Run the children; run `body` when all are ready; stop when it returns or a stop is requested.

        Returns:
            True if `body` returned; False if a stop was requested before.

        Raises:
            ConfigurationRefused: A child refused its settings.
            ClusterFailed: A child failed before the cluster was ready.
            Exception: The exception of `body`, after the children have been stopped.
        """
        async with asyncio.TaskGroup() as tasks:
            self._content = tasks.create_task(self._when_ready(body))
            await self._run()
            self._content.cancel()
        if self._failure is not None:
            raise self._failure
        return not self._content.cancelled()

    async def _when_ready(self, body: Callable[[], Awaitable[None]]) -> None:
        await self._ready.wait()
        try:
            await body()
        except Exception as error:  # noqa: BLE001 - supervisor: the children are stopped in order, then it is raised
            self._failure = error
        if not self._stop_asked:
            self._stop_asked = True
            self._events.put_nowait(StopRequested())

    async def _run(self) -> None:
        note_logs(self._folder, self._logs)
        await self._reaper.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._show_progress()), tasks.create_task(self._reaper.keep())]
                finished = self._perform(self._machine.begin(self._clock.now()), tasks)
                while not finished:
                    event = await self._next_event()
                    finished = self._perform(self._machine.handle(event, self._clock.now()), tasks)
                    self._machine.check()
                    self._note_parts()
                for task in beside:
                    task.cancel()
        finally:
            await self._reaper.end()

    async def _next_event(self) -> SupervisionEvent:
        instant = self._machine.next_instant()
        seconds = None if instant is None else max(0, instant - self._clock.now()) / SECOND
        try:
            async with asyncio.timeout(seconds):
                return await self._events.get()
        except TimeoutError:
            return SupervisionTicked()

    def _perform(self, commands: Sequence[SupervisionCommand], tasks: asyncio.TaskGroup) -> bool:
        """Perform commands; return True after the last one of all."""
        finished = False
        for command in commands:
            match command:
                case SpawnChild(name):
                    tasks.create_task(self._run_child(self._processes[name]))
                case AskToDrain(name, within):
                    tasks.create_task(self._ask_to_drain(name, within))
                case AskToStop(name):
                    self._send(name, signal.SIGTERM)
                case KillChild(name):
                    self._send(name, signal.SIGKILL)
                case AnnounceReady():
                    self._ready.set()
                case ReportRestart(name, status, pause, deaths):
                    if deaths <= SHOWN_DEATHS:
                        self._show_log(name)
                    often = f" for the {deaths}th time in a row" if deaths > SHOWN_DEATHS else ""
                    self._say(f"{name} {_ending(status)}{often}; starting it again in {pause / SECOND:.2g} s")
                case ForgetChild(name):
                    del self._processes[name]
                    self._endpoints.pop(name, None)
                case ReportFailure(name, reason, status):
                    self._failure = self._explain(name, reason, status)
                    if self._content is not None:
                        self._content.cancel()
                case SupervisionFinished():
                    finished = True
                case _:
                    assert_never(command)
        return finished

    async def _run_child(self, process: LocalProcess) -> None:
        """Run a child once, from its start until its group has ended."""
        name = process.child.name
        self._unsent.pop(name, None)
        read_fd, write_fd = os.pipe()
        try:
            with self._log(name).open("ab") as log:
                running = await asyncio.create_subprocess_exec(
                    *process.command,
                    *(() if process.limits.silent is None else ("--heartbeat",)),
                    *("--ready-fd", str(write_fd), "--parent", str(os.getpid())),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=(write_fd,),
                )
        except OSError as error:
            self._say(f"{name} cannot be started: {error}")
            os.close(read_fd)
            self._events.put_nowait(ChildExited(name, SPAWN_FAILED))
            return
        finally:
            os.close(write_fd)
        self._running[name] = running
        self._reaper.tell("+", running.pid)
        self._note_parts()
        if (unsent := self._unsent.pop(name, None)) is not None:
            self._send(name, unsent)
        heard = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as watching:
                tasks = [
                    watching.create_task(self._listen(name, read_fd, heard)),
                    watching.create_task(self._watch(process, running.pid, heard)),
                ]
                status = await running.wait()
                for task in tasks:
                    task.cancel()
            for pause in kill_group(running.pid):
                await asyncio.sleep(pause)
        except asyncio.CancelledError:
            end_group(running.pid)  # blocks for a moment, because a cancelled run must not leave processes behind
            raise
        finally:
            self._reaper.tell("-", running.pid)
            del self._running[name]
        self._events.put_nowait(ChildExited(name, status))

    async def _ask_to_drain(self, name: str, within: Nanos) -> None:
        running, endpoints = self._running.get(name), self._endpoints.get(name)
        if running is None or endpoints is None:
            return  # the child has just ended
        told = self._drain is not None and await self._drain(endpoints, within)
        if not told and self._running.get(name) is running:
            self._send(name, signal.SIGTERM)

    async def _listen(self, name: str, read_fd: int, heard: asyncio.Event) -> None:
        """Read the child's readiness line, then its heartbeats. No line means that the child ended or is too late."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            self._endpoints[name] = msgspec.json.decode(line, type=dict[str, str])
            self._events.put_nowait(ChildReady(name))
            while await reader.read(1 << 16):
                heard.set()
        finally:
            transport.close()

    async def _watch(self, process: LocalProcess, pid: int, heard: asyncio.Event) -> None:
        """Sample a child until it hangs or ends."""
        name, liveness = process.child.name, Liveness(process.limits, self._clock.now())
        while (look := sample_process(pid)) is not None:
            hang = liveness.observe(look, heard=heard.is_set(), now=self._clock.now())
            heard.clear()
            if hang is not None:
                self._say(f"{name} {hang.why}, and is killed")
                self._events.put_nowait(ChildUnresponsive(name))
                return
            await asyncio.sleep(SAMPLE_INTERVAL / SECOND)

    def _send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child; a child that is being started gets it afterwards."""
        if (running := self._running.get(name)) is None:
            self._unsent[name] = number
        elif running.returncode is None:
            running.send_signal(number)

    def _note_parts(self) -> None:
        """Record the states of the children if they have changed. A full disk only stops the record."""
        now = self._clock.now()
        parts = {
            name: ProcessReport(
                condition=standing.condition,
                pid=self._running[name].pid if name in self._running else None,
                deaths=standing.deaths,
                last_end="" if standing.last_status is None else _ending(standing.last_status),
                pause_seconds=None if standing.starts_at is None else round((standing.starts_at - now) / SECOND, 1),
            )
            for name, standing in self._machine.child_statuses().items()
        }
        if parts != self._noted:
            with suppress(OSError):
                note_parts(self._folder, parts)
                self._noted = parts

    async def _show_progress(self) -> None:
        started = self._clock.now()
        pause = FIRST_PROGRESS
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, PROGRESS_EVERY)
            child_states = self._machine.child_states()
            loading = [name for name, condition in child_states.items() if condition is ChildState.STARTING]
            if loading and not self._machine.announced:
                self._say(f"loading {', '.join(loading)} ({Nanos(self._clock.now() - started) // SECOND} s)")

    def _explain(self, name: str, reason: str, status: int | None) -> Exception:
        if status == CONFIGURATION_REFUSED:
            words = self._log_tail(name, 1).removeprefix("fleet: ")
            return ConfigurationRefused(words or f"{name} refused its settings")
        self._show_log(name)
        return ClusterFailed(f"{name} {reason}" + ("" if status is None else f": it {_ending(status)}"))

    def _show_log(self, name: str) -> None:
        if tail := self._log_tail(name, LOG_TAIL_LINES):
            self._say(f"the last lines of {name}'s log:\n{tail}")

    def _log_tail(self, name: str, lines: int) -> str:
        log = self._log(name)
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _ending(status: int) -> str:
    if status == CONFIGURATION_REFUSED:
        return "refused its settings"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
