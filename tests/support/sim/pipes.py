"""Pipes as files: their content can be read only once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def a_pipe(content: str) -> Iterator[Path]:
    """Yield the path of a pipe with this content, which must be at most 4 KiB, as a shell's ``<(command)`` does."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "w") as file:
            file.write(content)
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
