"""Flight recorder: writes the events and commands of a router to a recording while it serves (`fleet.recording.format`).

Rules:

1. Recording never stops or delays a router, because a thread writes the lines, ten times a second. An error ends only the recording, and is
   logged.
2. The size of a recording is limited. It ends when it has `most_bytes`, or when more than `MAX_BACKLOG_BYTES` wait for the disk. Later
   events are then lost, and not the first ones, because a recording can be replayed only from its start.
3. An existing file is the recording of an earlier process. It is renamed to `.1`, an existing `.1` to `.2`, and so on; the last
   `KEPT_RECORDINGS` are kept. A recording has the suffix `.new` until its first event. So a router that ends before its first event does
   not rename earlier recordings.
4. Until the recording ends, all events are recorded, even an event for which the machine raises an error.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
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
from fleet.router.observer import ObservedMachine, Observer, Observers
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import PromptHasher, hash_prompt
from kvstore.protocol.versions import own_protocols

log = logging.getLogger(__name__)

MIB = 1 << 20
MAX_BACKLOG_BYTES = 64 * MIB
WRITE_INTERVAL_SECONDS = 0.1
STOP_SECONDS = 5.0  # time limit to write the remaining lines when the router ends
KEPT_RECORDINGS = 3  # number of recordings of earlier processes that are kept


class FlightRecorder:
    """Writes one recording. It is an observer (`fleet.router.observer.Observer`), and hashes prompts for the router machine."""

    def __init__(self, path: Path, most_bytes: int, head: RecordingHead, hasher: PromptHasher = hash_prompt):
        """Open the recording at `path`. It gets at most `most_bytes` bytes. The results of `hasher` are recorded too.

        Raises:
            ConfigurationRefused: The path is not a regular file, or cannot be written.
        """
        self._path = path
        self._hasher = hasher
        self._remaining_bytes = most_bytes
        self._keys: list[Keys] = []  # block keys of the prompts that were hashed since the last event
        self._lines: deque[bytes] = deque()  # lines that the thread has not taken yet
        self._enqueued = 0  # number of bytes that were passed to the thread so far
        self._written = 0  # number of bytes that the thread has written so far
        self._has_event = False  # True if an event was recorded
        self._ended = False  # True if the recording has ended
        self._stop = threading.Event()
        if path.is_dir():
            raise ConfigurationRefused(f"record: {path}: Is a directory; name a file")
        if path.exists() and not path.is_file():  # for example a device, which must not be renamed
            raise ConfigurationRefused(f"record: {path}: Is not a regular file; name another")
        try:
            _new_path(path).touch(mode=0o600)
            file = _new_path(path).open("wb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError is raised if the name contains NUL
            raise ConfigurationRefused(f"record: {path}: {getattr(error, 'strerror', error)}") from error
        self._add(head_line(head))
        self._thread = threading.Thread(target=self._write, args=(file,), name="flight recorder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("the router ended" if error is None else f"the router ended: {type(error).__name__}")

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        if self._ended:
            return
        self._has_event = True
        keys, self._keys = self._keys, []
        try:
            self._add(entry_line(now, event, keys, commands))
        except Exception:  # supervisor: an error ends only the recording, and the router continues
            log.exception("recording stopped, an event cannot be written", extra={"event": type(event).__name__})
            self._end(f"a {type(event).__name__} could not be written")

    def hash(self, tokens: TokenBytes, block_tokens: int, salt: bytes) -> Keys:
        """Return the block keys of a prompt, and record them with the next event."""
        keys = self._hasher(tokens, block_tokens, salt)
        if not self._ended:
            self._keys.append(keys)
        return keys

    def close(self, why: str) -> None:
        """End the recording for the reason `why`, and write the remaining lines within `STOP_SECONDS`."""
        self._end(why)
        self._stop.set()
        self._thread.join(STOP_SECONDS)

    def _add(self, line: bytes) -> None:
        if len(line) > self._remaining_bytes:
            self._end("it has its full size (record_mib)")
            log.warning("recording stopped at its full size", extra={"path": str(self._path)})
        elif self._enqueued - self._written > MAX_BACKLOG_BYTES:
            self._end("the disk was too slow")
            log.warning("recording stopped, the disk is too slow", extra={"path": str(self._path)})
        else:
            self._remaining_bytes -= len(line)
            self._enqueue(line)

    def _enqueue(self, line: bytes) -> None:
        self._enqueued += len(line)
        self._lines.append(line)

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._keys = []
            self._enqueue(end_line(why))

    # The thread runs the following methods.

    def _write(self, file: BinaryIO) -> None:
        try:
            with file:
                while not (self._stop.wait(WRITE_INTERVAL_SECONDS) or self._has_event):
                    pass
                if not self._has_event:
                    _new_path(self._path).unlink()
                    return
                _rotate(self._path)
                while not self._stop.wait(WRITE_INTERVAL_SECONDS):
                    self._drain(file)
                self._drain(file)
        except OSError as error:
            self._ended = True
            self._lines.clear()
            log.error("recording stopped", extra={"path": str(self._path), "cause": error.strerror})  # noqa: TRY400 - no traceback, because the router is not affected

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
    """Return a router's machine, and the recorder that observes it. If `also` is given, the machine calls it after the recorder.

    Raises:
        ConfigurationRefused: The path `settings.record` is not a regular file, or cannot be written.
    """
    head = RecordingHead(
        recording=FORMAT,
        fleet=own_protocols().product,
        began=now,
        began_unix=int(unix_seconds()),
        seed=seed,
        settings=settings,
    )
    recorder = FlightRecorder(Path(settings.record), settings.record_mib * MIB, head)
    observer: Observer = recorder if also is None else Observers(recorder, also)
    return ObservedMachine(settings, Random(seed), policy, recorder.hash, observer=observer), recorder


def _new_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _rotate(path: Path) -> None:
    """Rename the recordings of earlier processes, and give this recording its final name (rule 3)."""
    earlier = [path.with_name(f"{path.name}.{number}") for number in range(KEPT_RECORDINGS, 0, -1)]
    for later, sooner in pairwise([*earlier, path, _new_path(path)]):
        if sooner.exists():
            sooner.replace(later)
