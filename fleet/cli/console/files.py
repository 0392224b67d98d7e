"""Files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.core.errors import ConfigurationRefused


@contextmanager
def whole_file(path: Path, option: str) -> Iterator[Path]:
    """What is written to the path that this yields is at `path` afterwards; nothing is, if the block does not end well.

    Args:
        path: Of the file. What is no regular file, a pipe say, is written to directly.
        option: That named it.

    Raises:
        ConfigurationRefused: It cannot be written there; at once, if that can be seen at once.
    """
    try:
        if path.exists() and not path.is_file():
            if path.is_dir():
                raise IsADirectoryError(21, "Is a directory")
            yield path
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.touch()
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationRefused(f"{option}: {path}: {error.strerror or error}") from error
