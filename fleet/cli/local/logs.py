"""`fleet logs`: shows the logs of a cluster of `fleet up` on this machine."""

import argparse
import heapq
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from fleet.cli.console.exits import DONE
from fleet.cli.local.running import add_local_address, local_cluster
from fleet.core.errors import ConfigurationRefused

LINES = 100
MOST_LINES = 100_000
LONGEST_LINE = 4096  # maximum number of bytes that are read from the end of a log for each requested line
MOST_BYTES = 64 << 10  # maximum number of bytes of a log in memory at a time; a longer line is shown as several lines
POLL_SECONDS = 0.25
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+|(?<=\"time\":\")[^\"]+")
"""Finds the time in a line of a log, which is a text with a date or a JSON object with the field `time`."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="PROCESS", help="such as router or decode-0 (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=_lines, default=LINES, metavar="N", help=f"last lines of each log (default: {LINES})"
    )
    add_local_address(parser)


def run(arguments: argparse.Namespace) -> int:
    cluster = local_cluster(arguments.address, killed=True)
    # `logs` may be a link. It is resolved now, because the link may be removed before the logs.
    folder = cluster.logs.resolve()
    files = _files(folder, arguments.names)
    places = {name: _size(file) for name, file in files.items()}
    _show(_last_lines(files, places, arguments.lines), labelled=len(files) > 1)
    is_over = not arguments.follow
    try:
        while not is_over:
            time.sleep(POLL_SECONDS)
            is_over = cluster.killed or not cluster.folder.exists()
            if not arguments.names and folder.exists():
                files = _files(folder, ())  # read again, because pools may have got new workers
            _show(new_lines(files, places), labelled=len(files) > 1)
    except KeyboardInterrupt:  # Ctrl-C is the usual end of this command
        pass
    return DONE


def _files(folder: Path, names: Sequence[str]) -> Mapping[str, Path]:
    """Return the log file of each process, by the name of the process.

    Raises:
        ConfigurationRefused: A named process has no log.
    """
    found = {file.stem: file for file in sorted(folder.glob("*.log"))}
    for name in names:
        if name not in found:
            raise ConfigurationRefused(f"PROCESS: {name!r} has no log; there are {', '.join(found) or 'none'}")
    return {name: file for name, file in found.items() if name in names or not names}


def _last_lines(files: Mapping[str, Path], ends: Mapping[str, int], number: int) -> Iterator[tuple[str, str]]:
    """Yield the last lines of each log up to the position in `ends`, merged by time, each with the name of its process."""
    logs = [_stamped(name, _tail(file, ends[name], number)) for name, file in files.items()]
    for _, name, line in heapq.merge(*logs, key=itemgetter(0)):
        yield name, line


def _stamped(name: str, lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of a process in their order, each with its time and the name of the process."""
    stamp = ""
    for line in lines:
        found = STAMP.search(line)
        # a line without a time, such as a line of a traceback, is sorted by the time of the previous line
        stamp = max(stamp, found[0]) if found else stamp
        yield stamp, name, line


def _tail(file: Path, end: int, number: int) -> Iterator[str]:
    """Yield the last lines of a log up to the position `end`, at most `number`."""
    start = _tail_start(file, end, number)
    # `_tail_start` counts newlines. A carriage return, as in a progress bar, divides a line further, so there may be more
    # than `number` lines.
    surplus = sum(1 for _ in _lines_between(file, start, end)) - number
    return islice(_lines_between(file, start, end), max(0, surplus), None)


def _tail_start(file: Path, end: int, number: int) -> int:
    """Return the position in a log at which the last `number` lines before `end` begin.

    At most `LONGEST_LINE` bytes are searched for each line, so there may be fewer lines.
    """
    least = max(0, end - number * LONGEST_LINE)
    first, missing = end - 1, number  # the last byte is left out: if it is a newline, it ends the last line
    try:
        with file.open("rb") as log:
            while number and first > least:
                piece, first = _piece_before(log, first, least)
                count = piece.count(b"\n")
                if count >= missing:
                    return first + len(piece) - len(b"\n".join(piece.split(b"\n")[-missing:]))
                missing -= count
            if not least or not number:
                return least
            log.seek(least)
            # The first line that is read may have lost its beginning, so it is skipped.
            while least < end and (line := log.readline(min(MOST_BYTES, end - least))):
                least += len(line)
                if line.endswith(b"\n"):
                    break
    except FileNotFoundError:  # the cluster has just ended
        return end
    return least


def _piece_before(log: BinaryIO, end: int, least: int) -> tuple[bytes, int]:
    """Return the piece of a log that ends at `end`, and the position where it begins, which is not below `least`."""
    start = max(least, end - MOST_BYTES)
    log.seek(start)
    return log.read(end - start), start


def _lines_between(file: Path, start: int, end: int) -> Iterator[str]:
    for line in _between(file, start, end):
        yield from _text(line)


def new_lines(files: Mapping[str, Path], places: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the complete lines that were written since the last call, and full pieces (`MOST_BYTES`) of longer lines.

    Update `places`, the positions in the logs up to which lines were read.
    """
    for name, file in files.items():
        for line in _between(file, places.setdefault(name, 0), _size(file)):
            if not line.endswith(b"\n") and len(line) < MOST_BYTES:
                break  # the rest is not written yet
            places[name] += len(line)
            for each in _text(line):
                yield name, each


def _between(file: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the lines between two positions of a log with their newlines; divide lines that are longer than `MOST_BYTES`."""
    try:
        with file.open("rb") as log:
            log.seek(start)
            while start < end and (line := log.readline(min(MOST_BYTES, end - start))):
                start += len(line)
                yield line
    except FileNotFoundError:  # the cluster has just ended
        return


def _text(line: bytes) -> Sequence[str]:
    return line.decode("utf-8", "surrogateescape").splitlines()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _show(lines: Iterator[tuple[str, str]], *, labelled: bool) -> None:
    for name, line in lines:
        shown = line.encode("utf-8", "replace").decode()
        print(f"{name} | {shown}" if labelled else shown, flush=True)


def _lines(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_LINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MOST_LINES}")
    return int(text)
