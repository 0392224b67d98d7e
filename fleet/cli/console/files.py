"""Output files of commands: each is written completely or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.core.errors import ConfigurationRefused


@contextmanager
def whole_file(path: Path, option: str) -> Iterator[Path]:
    """Yield a temporary path. If the `with` block succeeds, rename the file there to `path`; if it fails, remove the file.

    If `path` is a device or a pipe, yield `path` itself, because no other file can replace it.

    Raises:
        ConfigurationRefused: The file cannot be written; the message names the option.
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
