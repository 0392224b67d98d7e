"""Download process: downloads one model from the Hugging Face Hub with the official client, and reports its progress.

The download runs in a separate process, so that it can be ended at any moment, and so that Fleet controls the
environment variables that the client reads. The process reads its task, including the token, as one line of standard
input, so the token is in no process list. It writes its reports to standard output, one per line.

Rules:

1. All files come from one commit, because the revision is resolved once.
2. A file appears in the snapshot when it is complete. If processes share the cache, only one of them downloads a file, and
   the others wait for it (the client's locks).
3. Unfinished files of a killed process are removed by the next download process, if no process holds their lock.
4. If the hub cannot be reached, a complete snapshot in the cache is used. If the revision is pinned and its snapshot in
   the cache is complete, the hub is not queried at all.
"""

import errno
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.hub import Repository

SPARE_BYTES = 16 << 20  # free bytes on the disk that links, locks and file lists need, in addition to the files
TELL_SECONDS = 1.0
ASK_SECONDS = 20.0  # time limit for the list of a repository's files
DOWNLOAD_THREADS = 8  # number of files that are downloaded at a time; the client's default

TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
OF_TOKENIZERS = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")
OF_MODELS = ("config.json", "generation_config.json")
WEIGHTS = ".safetensors"
MISTRAL_WEIGHTS = "consolidated"
"""Prefix of the names of weight files in Mistral's format. If a repository also has weight files of other names, these files
contain the same weights, and the files in Mistral's format are not downloaded."""


class DownloadRequest(Struct, frozen=True, kw_only=True):
    """The task of a download process: which model it downloads, and to which folder."""

    repository: Repository
    endpoint: str
    cache: str
    weights: bool
    """True if an engine runs the model; False if tokenizer, templates and configuration are enough."""

    token: str = ""


class DownloadFailure(StrEnum):
    """The reason why a download failed. It decides what the user is told to do."""

    REPOSITORY = "repository"  # the repository does not exist, or is private
    REVISION = "revision"
    GATED = "gated"  # the owners of the repository must grant access first
    TOKEN = "token"  # noqa: S105 - the hub refuses the token
    INCOMPLETE = "incomplete"  # the repository lacks a file that a model needs
    SPACE = "space"
    CACHE = "cache"  # the cache folder cannot be written
    UNREACHABLE = "unreachable"  # the hub cannot be reached; a retry may succeed


class DownloadProgress(Struct, frozen=True, tag="progress"):
    """Progress of a download: the bytes that are in the cache (`there`), and the bytes of the complete snapshot (`whole`)."""

    there: int
    whole: int


class DownloadComplete(Struct, frozen=True, tag="fetched"):
    """Report of the download process: the snapshot of the model is complete."""

    folder: str
    commit: str
    asked: str = ""
    """Reason why the hub could not be asked for a newer commit; empty if it has answered, or if no query was needed."""


class DownloadFailed(Struct, frozen=True, tag="failed"):
    failure: DownloadFailure
    cause: str


Event = DownloadProgress | DownloadComplete | DownloadFailed
ReportEvent = Callable[[DownloadProgress], None]


class _Incomplete(Exception):
    """Error: the repository lacks a file that the model needs."""


class _NoSpace(Exception):
    """Error: the disk has too little space for the files of the model."""


def wanted(files: Iterable[str], *, weights: bool) -> list[str]:
    """Return the names of the files to download, all of them at the repository's top level.

    With `weights`, these are all texts, such as configurations, and the weights in safetensors format. Without `weights`,
    these are the configurations of the model and the files of the tokenizer.
    """
    top = sorted(name for name in files if "/" not in name)
    texts = [name for name in top if name.endswith(TEXTS)]
    if not weights:
        return [name for name in texts if name in OF_MODELS or name.startswith(OF_TOKENIZERS)]
    tensors = [name for name in top if name.endswith(WEIGHTS)]
    common = [name for name in tensors if not name.startswith(MISTRAL_WEIGHTS)]
    return [*texts, *(common or tensors)]


def lacking(names: Sequence[str], *, weights: bool) -> str:
    """Return the name of a file that the model needs and that is not in `names`, or an empty text if no such file is missing."""
    if "config.json" not in names:
        return "config.json"
    if weights and not any(name.endswith(WEIGHTS) for name in names):
        return "*.safetensors weights"
    if not weights and "tokenizer.json" not in names:
        return "tokenizer.json"
    return ""


def main() -> None:
    """Read a `DownloadRequest` from standard input, download the model, and write events to standard output."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=DownloadRequest)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
            sys.stdout.buffer.flush()

    try:
        ended: Event = fetch(request, tell)
    except Exception as error:  # noqa: BLE001 - the client raises many types of exceptions; the parent reports each
        ended = failed(error)
    tell(ended)
    sys.stdout.buffer.flush()
    os._exit(0)  # ends at once; an ordinary exit would wait for threads of the client, which may still wait for the hub


def fetch(request: DownloadRequest, tell: ReportEvent) -> DownloadComplete:
    """Download the snapshot of a model into the cache, if it is not complete there, and return the result.

    Raises:
        Exception: Any exception of the client, or `_Incomplete` or `_NoSpace`; `failed` classifies it.
    """
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415 - only this process needs it

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its messages may contain links with credentials
    repository, token = request.repository, request.token or False
    if repository.is_pinned and (there := _whole(request)) is not None:
        return there
    api = HfApi(endpoint=request.endpoint, token=token, library_name="fleet")
    try:
        revision = api.resolve_revision(repository.name, revision=repository.revision, cache_dir=request.cache)
        commit = revision.resolved
        info = api.model_info(repository.name, revision=commit, files_metadata=True, timeout=ASK_SECONDS)
    except Exception as error:
        if failed(error).failure is DownloadFailure.UNREACHABLE and (there := _whole(request)) is not None:
            return msgspec.structs.replace(there, asked=failed(error).cause)
        raise
    siblings = {each.rfilename: each for each in info.siblings or ()}
    names = wanted(siblings, weights=request.weights)
    if lack := lacking(names, weights=request.weights):
        raise _Incomplete(lack)
    folder = _storage(request)
    _remove_unfinished(request)
    _check_space(folder, [siblings[name] for name in names])
    whole = sum(siblings[name].size or 0 for name in names)
    ended = threading.Event()
    telling = threading.Thread(target=_tell_progress, args=(folder, whole, tell, ended), daemon=True)
    telling.start()
    try:
        snapshot = snapshot_download(
            repository.name,
            revision=revision,
            cache_dir=request.cache,
            endpoint=request.endpoint,
            token=token,
            allow_patterns=[_literal(name) for name in names],
            max_workers=DOWNLOAD_THREADS,
            library_name="fleet",
        )
    finally:
        ended.set()
        telling.join()
    return DownloadComplete(snapshot, commit)


def failed(error: Exception) -> DownloadFailed:
    """Convert an exception of `fetch` to a report of a failed download."""
    from huggingface_hub import errors  # noqa: PLC0415 - only this process needs it

    cause = _one_line(error)
    match error:
        case _Incomplete():
            return DownloadFailed(DownloadFailure.INCOMPLETE, cause)
        case _NoSpace():
            return DownloadFailed(DownloadFailure.SPACE, cause)
        case errors.RevisionNotFoundError():
            return DownloadFailed(DownloadFailure.REVISION, cause)
        case errors.GatedRepoError():
            return DownloadFailed(DownloadFailure.GATED, cause)
        case errors.RepositoryNotFoundError() | errors.HFValidationError() | errors.DisabledRepoError():
            return DownloadFailed(DownloadFailure.REPOSITORY, cause)
        case errors.HfHubHTTPError():
            status = error.response.status_code
            by_status = {401: DownloadFailure.TOKEN, 403: DownloadFailure.TOKEN, 404: DownloadFailure.REPOSITORY}
            return DownloadFailed(by_status.get(status, DownloadFailure.UNREACHABLE), f"it answers with HTTP {status}")
        case errors.LocalEntryNotFoundError() | errors.RevisionResolutionError():
            return DownloadFailed(DownloadFailure.UNREACHABLE, _one_line(error.__cause__ or error))
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EFBIG):
            return DownloadFailed(DownloadFailure.SPACE, error.strerror or cause)
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR | errno.ENAMETOOLONG):
            return DownloadFailed(DownloadFailure.CACHE, f"{error.filename}: {error.strerror}")
        case _:  # the hub is unreachable or silent, or its answer is truncated
            return DownloadFailed(DownloadFailure.UNREACHABLE, f"{type(error).__name__}: {cause}")


def _whole(request: DownloadRequest) -> DownloadComplete | None:
    """Return the snapshot of the revision in the cache if it is complete, or None. Do not use the network."""
    from huggingface_hub import get_cached_repo_tree  # noqa: PLC0415 - only this process needs it
    from huggingface_hub.errors import CachedRepoTreeNotFoundError  # noqa: PLC0415

    repository, commit = request.repository, request.repository.revision
    if not repository.is_pinned:
        try:
            commit = (_storage(request) / "refs" / commit).read_text(encoding="ascii")
        except (OSError, ValueError):
            return None
    try:
        tree = get_cached_repo_tree(repository.name, revision=commit, cache_dir=request.cache)
    except CachedRepoTreeNotFoundError:
        return None
    names = wanted((file.path for file in tree), weights=request.weights)
    snapshot = _storage(request) / "snapshots" / commit
    if lacking(names, weights=request.weights) or not all((snapshot / name).is_file() for name in names):
        return None
    return DownloadComplete(str(snapshot), commit)


def _storage(request: DownloadRequest) -> Path:
    """Return the folder in the cache that holds the files of a repository."""
    return Path(request.cache) / f"models--{request.repository.name.replace('/', '--')}"


def _remove_unfinished(request: DownloadRequest) -> None:
    """Remove unfinished files of killed download processes, because the client never reuses them."""
    from filelock import FileLock, Timeout  # noqa: PLC0415 - comes with the client

    storage = _storage(request)
    for file in (storage / "blobs").glob("*.incomplete"):
        lock = Path(request.cache) / ".locks" / storage.name / f"{file.name.partition('.')[0]}.lock"
        with suppress(Timeout, OSError), FileLock(lock, timeout=0):
            file.unlink(missing_ok=True)


def _check_space(storage: Path, files: Iterable[Any]) -> None:
    """Check that the disk has space for the files. Without this check, the download would fail only after a long time.

    The bytes of unfinished downloads are on the disk already, so they count as free space.

    Raises:
        _NoSpace: The space is too small; the message states how much has to be downloaded, and how much is free.
    """
    blobs = storage / "blobs"
    missing = 0
    for file in files:
        blob = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if not (blobs / str(blob)).exists():
            missing += file.size or 0
    fetching = sum(_size(file) for file in blobs.glob("*.incomplete"))
    blobs.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(blobs).free
    if missing and missing + SPARE_BYTES > free + fetching:
        raise _NoSpace(f"{missing / 2**30:.1f} GiB are to be fetched, and {free / 2**30:.1f} GiB are free")


def _tell_progress(storage: Path, whole: int, tell: ReportEvent, ended: threading.Event) -> None:
    """Report the progress of the download every `TELL_SECONDS`, until `ended` is set.

    Files of this model that other processes download into the cache count too.
    """
    while not ended.wait(TELL_SECONDS):
        there = 0
        with suppress(OSError):  # the folder was removed meanwhile
            there = sum(_size(file) for file in (storage / "blobs").iterdir())
        tell(DownloadProgress(there, whole))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # the file was renamed just now, because it is complete
        return 0


def _literal(name: str) -> str:
    """Return a glob pattern that matches only this file name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _end_with_parent() -> None:
    """End this process when its parent ends. The end of the parent is noticed because it closes the standard input."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
