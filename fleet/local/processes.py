"""The processes of a cluster on this machine: performs what `fleet.local.supervision` decides.

Rules:

1. Every child leads a session and process group of its own, so that Ctrl-C in a terminal reaches the supervisor alone, and
   so that whatever a child has started can be ended with it. A child counts as gone when its whole group is.
2. Nothing outlives the supervisor, however it ends: the kernel kills the children (`process_group.die_with_parent`), and a
   guardian process ends what they had started and removes the runtime folder. Where both are killed, the next run does
   (`fleet.local.runs`).
3. Everything a child makes lies in the runtime folder: its settings, its socket, its temporary files, and its log, unless
   somebody wants to keep the logs.
4. A child is ready when it has written one line of JSON, its endpoints, to the file descriptor that it was given.
5. Every child is looked at twice a second. One that does not respond (`fleet.local.liveness`) is killed; that is a death like any
   other.
6. What each child does, and which of them fail, lies in the runtime folder for whoever wants to know (`fleet.local.runs`).
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
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
from fleet.local.runs import TEMPORARY, ProcessReport, note_group, note_logs, note_parts
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
SHOWN_DEATHS = 3  # in a row, with which the end of the log is shown; it will not say anything else later
FIRST_PROGRESS = 5.0  # seconds until the first line while children load; the pauses double
PROGRESS_EVERY = 40.0  # seconds between two lines, at most
ORPHAN_REAPER_SECONDS = 10.0  # in which the guardian clears up, which takes a moment when no child is left
SPAWN_FAILED = 127  # exit status of a child that could not be started, as shells have it

ChildEndpoints = Mapping[str, str]
"""Addresses that a child listens on, by protocol."""

Drain = Callable[[ChildEndpoints, Nanos], Awaitable[bool]]
"""Has a child finish what it has within a time, and end; False: it was not told so."""


class LocalProcess(Struct, frozen=True, kw_only=True):
    """A child and how to start it."""

    child: ChildProcess
    command: tuple[
        str, ...
    ]  # ``--ready-fd N --parent PID`` is appended, and ``--heartbeat`` before where it is to send beats
    limits: LivenessLimits = LivenessLimits()


class ClusterFailed(Exception):
    """The cluster ended although nobody had asked it to; the message is for a person, the log's tail has been shown."""


class LocalProcesses:
    """The running children; `run` returns when none is left.

    Args:
        processes: What to run.
        folder: The runtime folder; temporary files of the children go there.
        logs: Folder of the children's logs; they are appended to.
        environment: Variables of the children.
        clock: Time.
        say: Shows one line to a person.
        drain: How a child is told that it is removed; where that fails, or there is no way, it is stopped.
        longest_pause: The ceiling of the pause before a child that keeps dying is started again.
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
        self._events: asyncio.Queue[SupervisionEvent] = (
            asyncio.Queue()
        )  # bounded by nature: a few events a child, and signals
        self._running: dict[str, Process] = {}
        self._noted: Mapping[str, ProcessReport] = {}
        self._unsent: dict[str, signal.Signals] = {}  # to children whose start is under way
        self._endpoints: dict[str, ChildEndpoints] = {}
        self._ready = asyncio.Event()
        self._stop_asked = False
        self._content: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._guardian: Process | None = None

    @property
    def endpoints(self) -> Mapping[str, ChildEndpoints]:
        """By name of the child; complete when the cluster is ready."""
        return self._endpoints

    @property
    def pids(self) -> dict[str, int]:
        """Of the children that run now, by name."""
        return {name: process.pid for name, process in self._running.items()}

    @property
    def names(self) -> frozenset[str]:
        """Of all children; those that are on their way out are among them until they are gone."""
        return frozenset(self._processes)

    def child_states(self) -> Mapping[str, ChildState]:
        """By name; without those that were added a moment ago."""
        return self._machine.child_states()

    def failing(self) -> frozenset[str]:
        """Children that do not get ready again and again, or never will."""
        return self._machine.failing()

    def add(self, process: LocalProcess) -> None:
        """Run one more child. Only while a body is held; its name must be nobody's."""
        assert process.child.name not in self._processes, process.child.name
        self._processes[process.child.name] = process
        self._events.put_nowait(ChildAdded(process.child))

    def remove(self, name: str, within: Nanos) -> None:
        """Ask a child to finish what it has and to end, within a time; it is gone when `names` does not have it any more."""
        self._events.put_nowait(ChildRemoved(name, within))

    def request_stop(self) -> None:
        """Ask everything to end; the second time, kill it."""
        self._stop_asked = True
        self._events.put_nowait(StopRequested())
        if self._content is not None:
            self._content.cancel()

    async def hold(self, body: Callable[[], Awaitable[None]]) -> bool:
        """Run the children; when all are ready run `body`; when it returns, or somebody asks to stop, stop.

        Returns:
            Whether `body` came to its end; False when somebody asked to stop before.

        Raises:
            ConfigurationRefused: A child refused its settings.
            ClusterFailed: A child failed before the cluster was ready.
            Exception: Whatever `body` raised, after the children have been stopped.
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
        self._guardian = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.local.orphan_reaper", str(self._folder)),
            stdin=PIPE,
            stdout=DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        assert self._guardian.stdin is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                progress = tasks.create_task(self._show_progress())
                finished = self._perform(self._machine.begin(self._clock.now()), tasks)
                while not finished:
                    event = await self._next_event()
                    finished = self._perform(self._machine.handle(event, self._clock.now()), tasks)
                    self._machine.check()
                    self._note_parts()
                progress.cancel()
        finally:
            self._guardian.stdin.close()
            await self._end_guardian(self._guardian)

    async def _end_guardian(self, guardian: Process) -> None:
        """Wait until the guardian has ended; kill one that does not, because somebody stopped it."""
        try:
            async with asyncio.timeout(ORPHAN_REAPER_SECONDS):
                await guardian.wait()
        except TimeoutError:
            guardian.kill()
            await guardian.wait()

    async def _next_event(self) -> SupervisionEvent:
        instant = self._machine.next_instant()
        seconds = None if instant is None else max(0, instant - self._clock.now()) / SECOND
        try:
            async with asyncio.timeout(seconds):
                return await self._events.get()
        except TimeoutError:
            return SupervisionTicked()

    def _perform(self, commands: Sequence[SupervisionCommand], tasks: asyncio.TaskGroup) -> bool:
        """Carry out commands; True after the last one of all."""
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
        """One run of a child, from its start until its group is gone."""
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
        self._tell_guardian("+", running.pid)
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
            end_group(running.pid)  # blocks, for a moment: what was cancelled must not leave processes
            raise
        finally:
            self._tell_guardian("-", running.pid)
            del self._running[name]
        self._events.put_nowait(ChildExited(name, status))

    async def _ask_to_drain(self, name: str, within: Nanos) -> None:
        running, endpoints = self._running.get(name), self._endpoints.get(name)
        if running is None or endpoints is None:
            return  # it has just ended by itself
        told = self._drain is not None and await self._drain(endpoints, within)
        if not told and self._running.get(name) is running:
            self._send(name, signal.SIGTERM)

    async def _listen(self, name: str, read_fd: int, heard: asyncio.Event) -> None:
        """Read the child's line (no line means that it ended, or that it will not be ready in time), and then its beats."""
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
        """Look at a child until it is found to hang, which ends it, or has ended by itself."""
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
        """Signal a child (its group follows when it is gone); one that is just being started gets it then."""
        if (running := self._running.get(name)) is None:
            self._unsent[name] = number
        elif running.returncode is None:
            running.send_signal(number)

    def _note_parts(self) -> None:
        """Write down what each child does, where that has changed. On a full disk nobody learns it, and all else goes on."""
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

    def _tell_guardian(self, change: str, group: int) -> None:
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        self._guardian.stdin.write(f"{change}{group}\n".encode())
        note_group(self._folder, change, group)

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
