"""`fleet logs`: shows the logs of a cluster of `fleet up` on this machine."""

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleet.cli.console.exits import DONE
from fleet.cli.local.running import add_local_address, local_cluster
from fleet.core.errors import ConfigurationRefused

LINES = 100
MOST_LINES = 100_000
LONGEST_LINE = 4096  # bytes that are read from the end of a log for each requested line
POLL_SECONDS = 0.25
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+|(?<=\"time\":\")[^\"]+")
"""Finds the time in a line of a log."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="PROCESS", help="such as router or decode-0 (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=_lines, default=LINES, metavar="N", help=f"last lines of each log (default: {LINES})"
    )
    add_local_address(parser)


def run(arguments: argparse.Namespace) -> int:
    cluster = local_cluster(arguments.address, killed=True)
    folder = cluster.logs.resolve()  # a link, followed now because logs may outlive it
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
            _show(_new_lines(files, places), labelled=len(files) > 1)
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


def _last_lines(files: Mapping[str, Path], ends: Mapping[str, int], number: int) -> list[tuple[str, str]]:
    """Return the last lines of each log up to the position in `ends`, sorted by time, each with the name of its process."""
    stamped = []
    for name, file in files.items():
        start = max(0, ends[name] - number * LONGEST_LINE)
        text = _between(file, start, ends[name])
        stamp = ""
        for line in (text.splitlines()[1:] if start else text.splitlines())[-number:]:
            found = STAMP.search(line)
            # a line without a time, such as a line of a traceback, is sorted by the time of the previous line
            stamp = found[0] if found else stamp
            stamped.append((stamp, name, line))
    stamped.sort(key=lambda each: each[0])
    return [(name, line) for _, name, line in stamped]


def _new_lines(files: Mapping[str, Path], places: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the complete lines that were written since the last call.

    Update `places`, the positions in the logs up to which lines were read.
    """
    for name, file in files.items():
        begun = places.setdefault(name, 0)
        text = _between(file, begun, _size(file))
        whole = text[: text.rfind("\n") + 1]
        places[name] = begun + len(whole.encode("utf-8", "surrogateescape"))
        for line in whole.splitlines():
            yield name, line


def _between(file: Path, start: int, end: int) -> str:
    try:
        with file.open("rb") as log:
            log.seek(start)
            return log.read(max(0, end - start)).decode("utf-8", "surrogateescape")
    except FileNotFoundError:  # the cluster has just ended
        return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _show(lines: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], *, labelled: bool) -> None:
    for name, line in lines:
        shown = line.encode("utf-8", "replace").decode()
        print(f"{name} | {shown}" if labelled else shown, flush=True)


def _lines(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_LINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MOST_LINES}")
    return int(text)
