"""Local processes: runs the processes of a cluster on this machine, as the supervision machine decides.

Rules:

1. Each child leads its own session and process group. So Ctrl-C in a terminal reaches only the supervisor, and all
   processes that a child has started can be ended with it. A child counts as ended when its whole group has ended.
2. No process outlives the supervisor. If the supervisor is killed, the kernel kills the children
   (`process_group.die_with_parent`). An orphan reaper then ends the processes that the children had started, and removes
   the runtime folder. If supervisor and reaper are killed, the next run cleans up (`fleet.local.runs`). If only the
   reaper is killed, it is replaced. The reaper also reports a supervisor that hangs.
3. All files of a child are in the runtime folder: settings, socket, temporary files, and the log, unless logs are kept
   elsewhere.
4. A child is ready when it has written one line of JSON with its endpoints to its readiness file descriptor.
5. The state of every child is sampled twice a second. A child that hangs (`fleet.local.liveness`) is killed, which counts
   as a death.
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
# The end of a child's log is shown after each of its first deaths in a row, up to this number. Later deaths rarely have
# another cause.
SHOWN_DEATHS = 3
FIRST_PROGRESS = 5.0  # seconds after which the first message about the start of the children is shown
PHASE_CHECK = 0.5  # seconds between two checks which phase of its start each child has reached; a change is shown
PROGRESS_EVERY = 40.0  # seconds after which the phases are shown again, although they have not changed
PHASE_MARK = b"# "
STARTING = "starting"  # the phase that is shown for a child which has reported none
SPAWN_FAILED = 127  # exit status of a child that could not be started, as in shells

ChildEndpoints = Mapping[str, str]
"""Addresses of a child, by protocol."""

Drain = Callable[[ChildEndpoints, Nanos], Awaitable[bool]]
"""Function that asks a child process to drain within a time limit and then to end. It returns False if the call failed."""


class LocalProcess(Struct, frozen=True, kw_only=True):
    """A child process of a cluster: its name, its command and its limits."""

    child: ChildProcess
    # ``--ready-fd N --parent PID`` is appended, and before it ``--heartbeat`` if `limits.silent` is not None.
    command: tuple[str, ...]
    limits: LivenessLimits = LivenessLimits()


class ClusterFailed(Exception):
    """The cluster ended although nobody requested it, because a child failed before the cluster was ready.

    The message is for a person, and the end of the child's log has been shown already.
    """


class LocalProcesses:
    """Runs the child processes of a cluster while `hold` runs.

    Args:
        processes: The processes to run.
        folder: The runtime folder; temporary files of the children go there.
        logs: Folder of the children's logs; existing logs are continued.
        environment: Environment variables of the children.
        clock: The clock.
        say: Shows one line to a person.
        drain: Asks a removed child to drain. If it is None or fails, the child is stopped instead.
        longest_pause: Maximum pause before a child that keeps dying is restarted.
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
        self._phases: dict[str, str] = {}  # the phases that starting children have reported
        self._ready = asyncio.Event()
        self._stop_asked = False
        self._content: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._reaper = ReaperProcess(folder, self._environment, clock, say)

    @property
    def endpoints(self) -> Mapping[str, ChildEndpoints]:
        """Addresses of the children, by name and protocol. All children are included when the cluster is ready."""
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
        """Return the states of the children by name; children that were added just now may be missing."""
        return self._machine.child_states()

    def failing(self) -> frozenset[str]:
        """Return the names of the children that have died and are not ready again; none while the cluster stops."""
        return self._machine.failing()

    def add(self, process: LocalProcess) -> None:
        """Add a child; call this only while the `body` of `hold` runs, and with a name that is not in `names`."""
        assert process.child.name not in self._processes, process.child.name
        self._processes[process.child.name] = process
        self._events.put_nowait(ChildAdded(process.child))

    def remove(self, name: str, within: Nanos) -> None:
        """Ask a child to drain within a time limit and then to end. The child has ended when `names` does not contain it any more."""
        self._events.put_nowait(ChildRemoved(name, within))

    def request_stop(self) -> None:
        """Ask all children to end. A second call kills them."""
        self._stop_asked = True
        self._events.put_nowait(StopRequested())
        if self._content is not None:
            self._content.cancel()

    async def hold(self, body: Callable[[], Awaitable[None]]) -> bool:
        """Run the children, and run `body` when all of them are ready.

        Stop the children when `body` returns or a stop is requested.

        Returns:
            True if `body` returned; False if a stop was requested before.

        Raises:
            ConfigurationRefused: A child refused its settings before the cluster was ready.
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
        except Exception as error:  # noqa: BLE001 - supervisor: `hold` raises the error of `body` after the children have stopped
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
        """Perform commands of the supervision machine. Return True if one of them says that no child is left."""
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
        """Run a child once, from its start until all processes of its group have ended."""
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
        heartbeat = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as watching:
                tasks = [
                    watching.create_task(self._listen(name, read_fd, heartbeat)),
                    watching.create_task(self._watch(process, running.pid, heartbeat)),
                ]
                status = await running.wait()
                for task in tasks:
                    task.cancel()
            for pause in kill_group(running.pid):
                await asyncio.sleep(pause)
        except asyncio.CancelledError:
            # this blocks the event loop until all processes of the group have ended; a cancelled run must not leave any behind
            end_group(running.pid)
            raise
        finally:
            self._reaper.tell("-", running.pid)
            del self._running[name]
        self._events.put_nowait(ChildExited(name, status))

    async def _ask_to_drain(self, name: str, within: Nanos) -> None:
        running, endpoints = self._running.get(name), self._endpoints.get(name)
        if running is None or endpoints is None:
            return  # the child has just ended
        drain_requested = self._drain is not None and await self._drain(endpoints, within)
        if not drain_requested and self._running.get(name) is running:
            self._send(name, signal.SIGTERM)

    async def _listen(self, name: str, read_fd: int, heartbeat: asyncio.Event) -> None:
        """Read what a child writes: the phases of its start (lines with `PHASE_MARK`), its readiness line, then heartbeats.

        If the child ends before it has written the readiness line, return.
        """
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            while (line := await reader.readline()).startswith(PHASE_MARK):
                self._phases[name] = line.removeprefix(PHASE_MARK).decode(errors="replace").strip()
            if not line.endswith(b"\n"):
                return
            self._endpoints[name] = msgspec.json.decode(line, type=dict[str, str])
            self._events.put_nowait(ChildReady(name))
            while await reader.read(1 << 16):
                heartbeat.set()
        finally:
            self._phases.pop(name, None)
            transport.close()

    async def _watch(self, process: LocalProcess, pid: int, heartbeat: asyncio.Event) -> None:
        """Sample the state of a child until it hangs or ends."""
        name, liveness = process.child.name, Liveness(process.limits, self._clock.now())
        while (look := sample_process(pid)) is not None:
            hang = liveness.observe(look, heartbeat=heartbeat.is_set(), now=self._clock.now())
            heartbeat.clear()
            if hang is not None:
                self._say(f"{name} {hang.why}, and is killed")
                self._events.put_nowait(ChildUnresponsive(name))
                return
            await asyncio.sleep(SAMPLE_INTERVAL / SECOND)

    def _send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child. If the child is just being started, it gets the signal as soon as it runs."""
        if (running := self._running.get(name)) is None:
            self._unsent[name] = number
        elif running.returncode is None:
            running.send_signal(number)

    def _note_parts(self) -> None:
        """Record the states of the children in the runtime folder, if they have changed.

        If the record cannot be written, for example to a full disk, keep the old one.
        """
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
        """Show the phases of the starting children when they have changed, and every `PROGRESS_EVERY`, until all are ready."""
        said, said_at = "", self._clock.now()
        await asyncio.sleep(FIRST_PROGRESS)
        while True:
            child_states = self._machine.child_states()
            phases: dict[str, list[str]] = {}
            for name, condition in child_states.items():
                if condition is ChildState.STARTING:
                    phases.setdefault(self._phases.get(name, STARTING), []).append(name)
            words = "; ".join(f"{phase}: {', '.join(names)}" for phase, names in phases.items())
            is_new = words != said or self._clock.now() - said_at >= PROGRESS_EVERY * SECOND
            if words and is_new and not self._machine.announced:
                self._say(words)
                said, said_at = words, self._clock.now()
            await asyncio.sleep(PHASE_CHECK)

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
