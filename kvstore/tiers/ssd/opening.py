"""Opening of the SSD tier: locks the directories, and finds out which blocks their segments contain."""

import errno
import logging
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from kvstore.clock import Clock, seconds
from kvstore.errors import StoreNotStarted, reason
from kvstore.tiers.ssd.disk import LOCK, DirectoryInUse, Disk, DiskFile, DiskSpace
from kvstore.tiers.ssd.segments.eviction import Score
from kvstore.tiers.ssd.segments.recovery import RecoveredSegment, UnreadableSegment, recover
from kvstore.tiers.ssd.segments.segment import Segment
from kvstore.tiers.ssd.settings import MIN_SEGMENTS, SsdSettings, footprint
from kvstore.tiers.ssd.state import SsdState
from kvstore.tiers.ssd.volume import AdmitRewrite, Volume

SPARE_FILES = 256  # number of file descriptors that are left for everything else in the process

Disks = Callable[[str], Disk]
MakeVolume = Callable[[Disk], Volume]

log = logging.getLogger(__name__)

DAMAGED = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""Error numbers that mean a damaged disk. With EUCLEAN and EBADMSG, ext4 and XFS report damaged metadata."""


class OpenFolder(Struct, frozen=True):
    """An opened directory, with its free space and its files as they were at the start."""

    volume: Volume
    space: DiskSpace
    segments: list[str]  # names of the segment files


def open_volumes(
    settings: SsdSettings, state: SsdState, clock: Clock, *, disks: Disks, score: Score, admit_rewrite: AdmitRewrite
) -> list[Volume]:
    """Open one `Volume` for each directory, and add the blocks that are found in the directories to the index.

    A directory whose disk has failed is left out (`_has_failed`).

    Raises:
        StoreNotStarted: A setting cannot be used here; the message begins with its name. Nothing is left open.
    """
    began = clock.now()
    _allow_descriptors(settings)
    with ExitStack() as stack:
        opened: list[OpenFolder] = []
        for number, folder in enumerate(settings.directories):
            directory = _open_directory(
                f"directories[{number}]",
                folder,
                disks,
                lambda disk: Volume(disk, settings, state, clock, score, admit_rewrite),
            )
            if directory is None:
                continue
            stack.callback(directory.volume.disk.close)
            if (can_hold := directory.volume.can_hold) < MIN_SEGMENTS:
                raise StoreNotStarted(
                    f"capacity_bytes: beside the other files in {folder} there is room for {can_hold} segments "
                    f"of {settings.segment_bytes} bytes, not {MIN_SEGMENTS}; raise it, or clear the directory"
                )
            opened.append(directory)
        _warn_of_little_room(settings, opened)
        volumes = [directory.volume for directory in opened]
        for volume, found in zip(volumes, _recover(opened, settings.threads, state), strict=True):
            volume.restore(found, clock.now())
        stack.pop_all()
    log.info(
        "SSD tier opened",
        extra={
            "blocks": len(state.index),
            "seconds": seconds(clock.now() - began),
            "folders": [volume.disk.folder for volume in volumes],
        },
    )
    return volumes


def _allow_descriptors(settings: SsdSettings) -> None:
    """Raise this process's limit of open files, so that the files of all segments can be open.

    Raise StoreNotStarted if the hard limit of the system is too low for this.
    """
    files = len(settings.directories) * (settings.share_bytes // footprint(settings.segment_bytes)) + SPARE_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files <= limit or limit == resource.RLIM_INFINITY:
        return
    if files > most != resource.RLIM_INFINITY:
        raise StoreNotStarted(
            f"segment_bytes: {settings.segment_bytes} makes {files} open files, and the limit is {most}; "
            "use larger segments, or raise the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def _warn_of_little_room(settings: SsdSettings, opened: Sequence[OpenFolder]) -> None:
    """Warn at the start if a file system has less space than the settings allow the tier to use.

    The tier starts nevertheless and uses the space that exists: a disk may have been replaced by a smaller one, and other
    programs may free space later.
    """
    by_device: dict[int, list[tuple[str, DiskSpace]]] = {}
    for directory in opened:
        space = directory.space
        by_device.setdefault(space.device, []).append((directory.volume.disk.folder, space))
    for together in by_device.values():
        first, wanted = together[0][1], settings.share_bytes * len(together)
        left = first.free + sum(space.ours for _, space in together)
        if first.total and wanted > left:
            log.warning(
                "capacity_bytes: the file system has less space, all of it will be used",
                extra={
                    "folders": ", ".join(folder for folder, _ in together),
                    "capacity_bytes": wanted,
                    "left_bytes": left,
                    "total_bytes": first.total,
                },
            )


def _open_directory(field: str, folder: str, disks: Disks, make_volume: MakeVolume) -> OpenFolder | None:
    """Open a directory, and read its free space and the names of its files; return None if its disk has failed.

    Raises:
        StoreNotStarted: The setting `field`, which names the directory, is wrong. The directory is closed again.
    """
    with ExitStack() as stack:
        try:
            disk = disks(folder)
            stack.callback(disk.close)
            directory = OpenFolder(make_volume(disk), disk.space(), disk.segments())
        except DirectoryInUse:
            raise StoreNotStarted(
                f"{field}: {folder} is in use by another process; give each process its own"
            ) from None
        except (OSError, ValueError) as error:  # ValueError: the path contains a zero byte
            if isinstance(error, OSError) and _has_failed(folder, error):
                log.error(  # noqa: TRY400 - the traceback says no more than the reason
                    "SSD tier: disk failed, going on without it until the next start",
                    extra={"folder": folder, "error": reason(error)},
                )
                return None
            raise StoreNotStarted(
                f"{field}: {folder!r} cannot be used: {reason(error)}; make it writable for this process, or name another one"
            ) from error
        stack.pop_all()
        return directory


def _has_failed(folder: str, error: OSError) -> bool:
    """Return whether an error was caused by the disk and not by a wrong setting.

    Linux makes a file system read-only after an error. A read-only directory that no store has used is a wrong setting.
    """
    return error.errno in DAMAGED or (error.errno == errno.EROFS and Path(folder, LOCK).exists())


def _recover(
    opened: Sequence[OpenFolder], threads: int, state: SsdState
) -> list[list[tuple[Segment, RecoveredSegment | UnreadableSegment]]]:
    """Read the files of all directories, several at a time; return for each directory its segments with their contents.

    Files that cannot be opened are left out.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ssd-open") as pool:
        reading = [[pool.submit(_open, each.volume.disk, name) for name in each.segments] for each in opened]
        read = [[future.result() for future in futures] for futures in reading]
    found: list[list[tuple[Segment, RecoveredSegment | UnreadableSegment]]] = []
    for directory, files in zip(opened, read, strict=True):
        volume = directory.volume
        found.append([])
        for name, file, recovered in files:
            if isinstance(recovered, UnreadableSegment):
                log.warning(
                    "segment unreadable, it will be overwritten when space is needed",
                    extra={"folder": volume.disk.folder, "file": name, "reason": recovered.reason},
                )
            else:
                state.sequence = max(state.sequence, recovered.last_sequence)
            if file is None:
                volume.count_unusable(name)
                continue
            segment = Segment(state.index.slot(), volume.disk.folder, name, file)
            state.index.enroll(segment)
            found[-1].append((segment, recovered))
    return found


def _open(disk: Disk, name: str) -> tuple[str, DiskFile | None, RecoveredSegment | UnreadableSegment]:
    try:
        file = disk.open(name)
    except OSError as error:
        return name, None, UnreadableSegment(reason(error))
    try:
        return name, file, recover(file)
    except OSError as error:
        return name, file, UnreadableSegment(reason(error))
