"""Weights revision: a digest that tells apart two models, or two LoRA adapters, with the same name."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

# Up to this many bytes, all content is read by SHA-256, at about 1.5 GB/s; above, only headers are read.
WHOLE_CONTENT_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")


def revision_of(files: Iterable[Path]) -> str:
    """Return a digest of a folder's configuration (JSON) and weights (safetensors), 32 hex digits.

    Up to 1 GiB, all files are read. Above, each weight file counts by its name, size, modification time and header,
    which lists the type, shape and place of every tensor. Two copies of one model then share blocks only if they were
    copied with their times, but two different models never do. A file from the Hugging Face Hub counts by its SHA-256
    instead of its time, wherever and whenever it was fetched.
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
                digest.update((_sha256_of(file) or str(file.stat().st_mtime_ns)).encode())
                header_bytes = int.from_bytes(content.read(8), "little")
                digest.update(content.read(header_bytes))
    return digest.hexdigest()[:32]


def _sha256_of(file: Path) -> str:
    """Return the SHA-256 in the name of a file that the hub's client has stored; empty if the file is another one."""
    name = file.resolve().name if file.is_symlink() else ""
    return name if SHA256.fullmatch(name) else ""
