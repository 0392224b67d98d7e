"""The flight recorder: writes down what a router hears and says while it serves, see `fleet.recording.format`.

Rules:

1. Recording never stops a router, and never makes it wait: lines are handed to a thread that writes them, ten times a second. What
   goes wrong ends the recording with a line in the log, and nothing else.
2. A recording is bounded. What would go beyond `most_bytes`, or beyond `MAX_BACKLOG_BYTES` that the disk has not taken, ends it: a part
   of a recording can be replayed from its beginning only, so the beginning is what is kept.
3. A file that is there already is another process's last flight, and may be what somebody is about to look at. It is moved to
   `.1`, what was there to `.2` and so on; the last `KEPT_RECORDINGS` are kept. Until the first event a recording is `.new`: routers that end
   before they heard of anything leave what is there alone.
4. Events are complete: what the machine hears while it breaks is written too.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from types import TracebackType
from typing import BinaryIO, Self

from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import TokenBytes
from fleet.core.system_clock import unix_seconds
from fleet.recording.format import FORMAT, Keys, RecordingHead, end_line, entry_line, head_line
from fleet.router.messages import Command, RouterEvent
from fleet.router.observer import ObservedMachine, Observer
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import PromptHasher, hash_prompt

log = logging.getLogger(__name__)

MIB = 1 << 20
MAX_BACKLOG_BYTES = 64 * MIB
WRITE_INTERVAL_SECONDS = 0.1
STOP_SECONDS = 5.0  # for what is left when the router ends
KEPT_RECORDINGS = 3  # earlier recordings
DISTRIBUTION = "fleet-serving"


class FlightRecorder:
    """One recording; a context manager. Implements `fleet.router.observer.Observer`, and is the hasher of its machine."""

    def __init__(self, path: Path, most_bytes: int, head: RecordingHead, hasher: PromptHasher = hash_prompt):
        """Begin.

        Args:
            path: Of the file.
            most_bytes: Of it.
            head: Its first line.
            hasher: Whose answers are recorded.

        Raises:
            ConfigurationRefused: It cannot be written there.
        """
        self._path = path
        self._hasher = hasher
        self._room = most_bytes
        self._keys: list[Keys] = []  # that were asked for since the last event
        self._lines: deque[bytes] = deque()  # for the thread
        self._behind = 0  # bytes that were handed to the thread
        self._written = 0  # bytes of these that it has written
        self._heard = False  # an event
        self._over = False  # nothing more is taken
        self._stop = threading.Event()
        if path.is_dir():
            raise ConfigurationRefused(f"record: {path}: Is a directory; name a file")
        if path.exists() and not path.is_file():  # a device, say: what is there would be moved away
            raise ConfigurationRefused(f"record: {path}: Is no regular file; name another")
        try:
            _new_path(path).touch(mode=0o600)
            file = _new_path(path).open("wb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise ConfigurationRefused(f"record: {path}: {getattr(error, 'strerror', error)}") from error
        self._take(head_line(head))
        self._thread = threading.Thread(target=self._write, args=(file,), name="flight recorder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("the router ended" if error is None else f"the router ended: {type(error).__name__}")

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        if self._over:
            return
        self._heard = True
        keys, self._keys = self._keys, []
        try:
            self._take(entry_line(now, event, keys, commands))
        except Exception:  # supervisor: whatever cannot be written down, the router serves on
            log.exception("recording stopped, an event cannot be written", extra={"event": type(event).__name__})
            self._end(f"a {type(event).__name__} could not be written")

    def hash(self, tokens: TokenBytes, block_tokens: int, salt: bytes) -> Keys:
        """What the hasher says; it is written down with the event that it is asked for."""
        keys = self._hasher(tokens, block_tokens, salt)
        if not self._over:
            self._keys.append(keys)
        return keys

    def close(self, why: str) -> None:
        """Write what is left, within `STOP_SECONDS`."""
        self._end(why)
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def _take(self, line: bytes) -> None:
        if len(line) > self._room:
            self._end("it has its full size (record_mib)")
            log.warning("recording stopped at its full size", extra={"path": str(self._path)})
        elif self._behind - self._written > MAX_BACKLOG_BYTES:
            self._end("the disk was too slow")
            log.warning("recording stopped, the disk is too slow", extra={"path": str(self._path)})
        else:
            self._room -= len(line)
            self._hand_over(line)

    def _hand_over(self, line: bytes) -> None:
        self._behind += len(line)
        self._lines.append(line)

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._keys = []
            self._hand_over(end_line(why))

    # The thread.

    def _write(self, file: BinaryIO) -> None:
        try:
            with file:
                while not (self._stop.wait(WRITE_INTERVAL_SECONDS) or self._heard):
                    pass
                if not self._heard:
                    _new_path(self._path).unlink()
                    return
                _rotate(self._path)
                while not self._stop.wait(WRITE_INTERVAL_SECONDS):
                    self._drain(file)
                self._drain(file)
        except OSError as error:
            self._over = True
            self._lines.clear()
            log.error("recording stopped", extra={"path": str(self._path), "cause": error.strerror})  # noqa: TRY400 - the router is fine

    def _drain(self, file: BinaryIO) -> None:
        while self._lines:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            data = memoryview(b"".join(lines))
            while data:
                taken = file.write(data)
                self._written += taken
                data = data[taken:]


def open_recorded_machine(
    settings: RouterSettings, seed: int, policy: PlacementPolicy, now: Nanos, *, also: Observer | None = None
) -> tuple[ObservedMachine, FlightRecorder]:
    """A router's machine and the recorder that looks on; settings say where it writes.

    Args:
        settings: Of the router.
        seed: Of its luck.
        policy: That chooses workers.
        now: The instant.
        also: Who looks on as well, after the recorder.

    Raises:
        ConfigurationRefused: It cannot be written there.
    """
    head = RecordingHead(
        recording=FORMAT,
        fleet=version(DISTRIBUTION),
        began=now,
        began_unix=unix_seconds(),
        seed=seed,
        settings=settings,
    )
    recorder = FlightRecorder(Path(settings.record), settings.record_mib * MIB, head)
    observer: Observer = recorder if also is None else _ObserverPair(recorder, also)
    return ObservedMachine(settings, Random(seed), policy, recorder.hash, observer=observer), recorder


class _ObserverPair:
    """Two observers, one after the other."""

    def __init__(self, first: Observer, second: Observer):
        self._first, self._second = first, second

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        self._first(now, event, commands)
        self._second(now, event, commands)


def _new_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _rotate(path: Path) -> None:
    """Move earlier recordings on, and this one to its place (rule 3)."""
    earlier = [path.with_name(f"{path.name}.{number}") for number in range(KEPT_RECORDINGS, 0, -1)]
    for later, sooner in pairwise([*earlier, path, _new_path(path)]):
        if sooner.exists():
            sooner.replace(later)
