"""Which weights these are: what tells two models of one name apart, or two adapters."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

WHOLE_CONTENT_BYTES = 1 << 30  # SHA-256 reads about 1.5 GB a second; above this, headers stand for the content
CHUNK_BYTES = 1 << 20


def revision_of(files: Iterable[Path]) -> str:
    """Digest of a folder's configuration (JSON) and weights (safetensors), 32 hex digits.

    Up to 1 GiB, all of it is read. Beyond, each weight file counts by its name, size, modification time and header (which
    lists every tensor's type, shape and place): two copies of one model then share blocks only if they were copied with
    their times, but two models never do.
    """
    files = sorted(files)
    whole = sum(file.stat().st_size for file in files) <= WHOLE_CONTENT_BYTES
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            if whole or file.suffix == ".json":
                while chunk := content.read(CHUNK_BYTES):
                    digest.update(chunk)
            else:
                digest.update(str(file.stat().st_mtime_ns).encode())
                header_bytes = int.from_bytes(content.read(8), "little")
                digest.update(content.read(header_bytes))
    return digest.hexdigest()[:32]
