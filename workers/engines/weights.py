"""Weights revision: a digest by which two models, or two LoRA adapters, with the same name are told apart."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

# If the files have at most this many bytes together, `revision_of` reads all of them, at about 1.5 GB/s. Otherwise it reads
# only the header of each weight file.
WHOLE_CONTENT_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")


def revision_of(files: Iterable[Path]) -> str:
    """Return a digest (32 hex digits) of a folder's configuration (JSON) and weights (safetensors).

    If the files have at most 1 GiB together, the digest covers all their bytes. Otherwise it covers all bytes of the
    JSON files. Of each weight file it then covers only the name, the size, the modification time and the header, which
    lists the type, shape and offset of every tensor. For a weight file in the cache of the Hugging Face Hub, the
    SHA-256 in its name replaces the modification time, so copies on different hosts have the same digest. Workers share
    KV blocks only if their digests are equal. A copy of a large model outside the Hub's cache must therefore keep the
    files' modification times.
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
    """Return the file's SHA-256, which the client of the Hugging Face Hub has put into its name; empty for any other file."""
    name = file.resolve().name if file.is_symlink() else ""
    return name if SHA256.fullmatch(name) else ""
