"""Settings loader: the only module that reads settings files and environment variables.

Rules:

1. A settings Struct stands beside the code that obeys it and documents each field. This module only nests the Structs.
2. A file is TOML (`.toml`) or JSON (any other suffix) of exactly one Struct. An unknown key, a wrong type or a value
   out of range raises `ConfigurationRefused` with the file, the path of the key and the cause, in one line.
3. The environment only says where caches go. It is passed on to child processes.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from fleet.core.errors import ConfigurationRefused, split_validation_error
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName
from fleet.core.roles import KvPath, Role
from fleet.membership.settings import SupervisionSettings
from fleet.router.settings.router import RouterSettings
from kvstore.eviction.policies import PolicyName
from kvstore.service.settings import AnyTier
from workers.settings import SimulatedSettings, VllmSettings
from workers.watchdog import WatchdogSettings

Settings = TypeVar("Settings", bound=Struct)
Positive = Annotated[int, Meta(ge=1)]

TINY = "tiny"
"""Value of `model` for the model that the project builds itself."""

SIMULATED = "simulated"
"""The engine that needs no further package."""


class ClusterSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that all processes share."""

    model: Annotated[str, Meta(min_length=1)] = TINY
    """Hugging Face folder, relative to the file; or a repository of the hub, such as Qwen/Qwen3-0.6B, with @revision if
    the newest one is not wanted; or "tiny", the model that the project builds itself.
    """

    served_name: str = ""
    """Name under which clients ask for the model; empty: the name of the folder or repository."""

    engine: Annotated[str, Meta(min_length=1)] = "vllm"
    """Name of an entry point in the group `workers.engines`."""

    kv_paths: tuple[KvPath, ...] = (KvPath.STORE,)
    """KV paths from prefill to decode workers, the preferred one first. The default is the store alone, because NIXL
    uses most of a core even when idle, which a machine without accelerators cannot spare.
    """

    block_tokens: Positive = 32
    """Tokens per KV block; vLLM on CPUs needs a multiple of 32."""

    max_model_len: Positive = 4096
    """Most tokens of prompt plus answer; the model's own limit also holds."""

    adapters: dict[ModelName, str] = {}
    """LoRA adapters that every worker may load: the name under which clients ask for each, and its folder, relative to
    the file. The simulated engine does not read the folders.
    """

    adapter_slots: Positive = 4
    """LoRA adapters that a worker can have loaded at a time."""

    most_workers: Positive = 64
    """Most workers that the machine has room for, such as its number of GPUs. `fleet scale` starts no more; draining
    workers count.
    """


class StorePlace(StrEnum):
    """Place of the KV store node."""

    PROCESS = "process"  # a process of its own: blocks survive the end of a worker
    WORKER = "worker"  # in the process of the only worker: one process less, but both end together


class StoreSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV store node."""

    place: StorePlace = StorePlace.PROCESS
    """Place of the node. "worker" needs exactly one worker."""

    capacity_mib: Positive = 256
    """Memory for blocks, allocated at the start. 256 MiB hold 65,000 tokens of the tiny model."""

    eviction: PolicyName = "lru"
    """Eviction policy: which blocks go first when the memory is full."""

    tiers: tuple[AnyTier, ...] = ()
    """Backing tiers, in the order in which they are asked: SSD, Redis, object stores, other nodes."""


class PoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of equal workers."""

    role: Role
    replicas: Annotated[int, Meta(ge=0, le=64)] = 1
    max_running: Positive = 16
    """Requests in one batch."""

    vllm: VllmSettings = VllmSettings()
    simulated: SimulatedSettings = SimulatedSettings()
    watchdog: WatchdogSettings = WatchdogSettings()


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster on one machine, for `fleet up`."""

    cluster: ClusterSection = ClusterSection()
    hub: HubSettings = HubSettings()
    router: RouterSettings = RouterSettings()
    store: StoreSection = StoreSection()
    supervision: SupervisionSettings = SupervisionSettings()
    pools: tuple[PoolSection, ...] = (PoolSection(role=Role.PREFILL), PoolSection(role=Role.DECODE))

    def replicas(self, role: Role) -> int:
        return sum(pool.replicas for pool in self.pools if pool.role is role)

    def __post_init__(self) -> None:
        if self.replicas(Role.PREFILL) and not self.replicas(Role.DECODE) + self.replicas(Role.BOTH):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")
        if not any(pool.replicas for pool in self.pools):
            raise ValueError("pools: no worker is left to start")
        if self.store.place is StorePlace.WORKER:
            self._check_store_in_worker()
        if self.replicas(Role.PREFILL) and not self.cluster.kv_paths:
            raise ValueError("cluster.kv_paths: prefill workers need a way to hand over blocks: store or direct")
        if self.router.models or self.router.store:
            raise ValueError("router: `models` and `store` follow from the other sections; leave them out")

    def _check_store_in_worker(self) -> None:
        workers = sum(pool.replicas for pool in self.pools)
        if workers != 1:
            raise ValueError(
                f"store.place: a store in the worker's process is for one worker, and `pools` has {workers}; use 'process'"
            )
        if KvPath.STORE not in self.cluster.kv_paths:
            raise ValueError("store.place: `cluster.kv_paths` has no 'store', so that there would be none")


def load(path: Path, kind: type[Settings], changes: Mapping[str, Any] | None = None) -> Settings:
    """Read settings from a file.

    Args:
        path: The file.
        kind: The Struct that the file describes.
        changes: Values that replace the file's, by path (``router.policy``, ``pools.0.gpus``).

    Raises:
        ConfigurationRefused: The file cannot be read, is not TOML or JSON, or does not fit `kind`.
    """
    try:
        content = path.read_bytes()
        raw = tomllib.loads(content.decode()) if path.suffix == ".toml" else msgspec.json.decode(content)
        for where, value in (changes or {}).items():
            _change(raw, where, value)
        return msgspec.convert(raw, kind)
    except OSError as error:
        raise ConfigurationRefused(f"{path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationRefused(f"{path}: {_with_path(error)}") from error
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigurationRefused(f"{path}: {_one_line(str(error))}") from error


def parse_changes(assignments: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Parse ``path=value`` options. Values are written as in TOML; anything else is a string.

    Args:
        assignments: The options; later ones win.
        option: Name of the option, for error messages.

    Raises:
        ConfigurationRefused: An option has no path or no equals sign.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigurationRefused(f"{option}: {assignment!r} is not PATH=VALUE, as in router.policy=random")
        changes.pop(path, None)
        changes[path] = parse_value(value)
    return changes


def merge_changes(changes: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both sets of changes in the order in which to apply them: all of `later` come after those of `changes`."""
    return {path: value for path, value in changes.items() if path not in later} | dict(later)


def read_file_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse ``path=file`` options and read the files: a `.json` file as JSON, any other file as text.

    So a mounted Secret need not be in a settings file or in a process list. A line break at the end of a text is
    removed.

    Raises:
        ConfigurationRefused: An option has no path, or its file cannot be read. The message never quotes the content.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, name = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigurationRefused(f"--set-file: {assignment!r} is not PATH=FILE, as in tenant_secret=/run/secret")
        try:
            content = Path(name).read_bytes()
            changes[path] = (
                msgspec.json.decode(content) if name.endswith(".json") else content.decode().removesuffix("\n")
            )
        except OSError as error:
            raise ConfigurationRefused(f"--set-file: {name}: {error.strerror}") from error
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            kind = "JSON" if name.endswith(".json") else "UTF-8"
            raise ConfigurationRefused(f"--set-file: {name}: is not {kind}") from None
    return changes


def parse_value(text: str) -> Any:
    """Parse a value as written in TOML; anything else is a string."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # thousands of digits or brackets
        return text
    return read["value"] if len(read) == 1 else text


def _change(raw: Any, where: str, value: Any) -> None:
    """Set one value in the parsed content of a file.

    Raises:
        ValueError: Nothing at that path can have such a field.
    """
    *parents, last = where.split(".")
    inner = raw
    for name in parents:
        inner = inner.setdefault(name, {}) if isinstance(inner, dict) else _element(inner, name, where)
    if isinstance(inner, dict):
        inner[last] = value
    else:
        _element(inner, last, where)
        inner[int(last)] = value


def _element(array: Any, index: str, where: str) -> Any:
    if not isinstance(array, list) or not index.isdecimal() or int(index) >= len(array):
        raise ValueError(f"{where}: there is no {index!r} there")
    return array[int(index)]


def build_settings(kind: Callable[..., Settings], **fields: Any) -> Settings:
    """Build settings from values of the program, such as command-line options.

    Raises:
        ConfigurationRefused: The values contradict each other.
    """
    try:
        return kind(**fields)
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def save(settings: Struct, path: Path) -> None:
    """Write settings as JSON for a child process. Only the owner can read the file, because it may contain secrets.

    Raises:
        ConfigurationRefused: A number is not finite, which JSON cannot express.
        OSError: The file cannot be written; `filename` is the path.
    """
    if (where := _not_finite(msgspec.to_builtins(settings))) is not None:
        raise ConfigurationRefused(f"{where}: must be finite")
    try:
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(settings))
    except OSError as error:  # for a full disk the system names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def model_folder(cluster: ClusterSection, tiny: Path, relative_to: Path) -> Path:
    """Return the folder of a cluster's model.

    Args:
        cluster: Names the model.
        tiny: The folder of the built-in model.
        relative_to: Folder that relative paths start from.

    Raises:
        ConfigurationRefused: The path is not a Hugging Face model folder.
    """
    if cluster.model == TINY:
        return tiny
    folder = (relative_to / Path(cluster.model).expanduser()).resolve()
    if not folder.is_dir():
        raise ConfigurationRefused(f"cluster.model: {folder} is not a folder")
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigurationRefused(
                f"cluster.model: {folder} is not a Hugging Face model folder: it has no {needed}"
            )
    return folder


def adapter_folders(cluster: ClusterSection, relative_to: Path) -> dict[ModelName, str]:
    """Return the folders of a cluster's LoRA adapters, by name.

    Raises:
        ConfigurationRefused: An adapter that the engine would read has no folder.
    """
    folders = {name: (relative_to / Path(folder).expanduser()).resolve() for name, folder in cluster.adapters.items()}
    for name, folder in folders.items():
        if cluster.engine != SIMULATED and not folder.is_dir():
            raise ConfigurationRefused(f"cluster.adapters.{name}: {folder} is not a folder")
    return {name: str(folder) for name, folder in folders.items()}


def served_name(cluster: ClusterSection, folder: Path) -> ModelName:
    """Return the name under which clients ask for the model."""
    if cluster.served_name:
        return ModelName(cluster.served_name)
    return ModelName(TINY if cluster.model == TINY else folder.name)


def default_cache_dir() -> Path:
    """Return the folder for built models, in the user's cache folder (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - this is the loader
    return (Path(home) if home else Path.home() / ".cache") / "fleet"


def child_environment() -> dict[str, str]:
    """Return environment variables for child processes: those of this process, and unbuffered output."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}  # noqa: TID251 - this is the loader


def _not_finite(value: Any) -> str | None:
    """Return the path of a number that is not finite; None if all are finite."""
    match value:
        case float():
            return None if isfinite(value) else ""
        case dict():
            inner = list(value.items())
        case list() | tuple():
            inner = list(enumerate(value))
        case _:
            return None
    for name, each in inner:
        if (where := _not_finite(each)) is not None:
            return f"{name}.{where}".rstrip(".")
    return None


def _with_path(error: msgspec.ValidationError) -> str:
    """Rewrite 'Object contains unknown field `x` - at `$.router`' as 'router.x: is not a known key'."""
    cause, path = split_validation_error(error)
    path = path.removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", cause):
        return f"{path}.{unknown[1]}: is not a known key" if path else f"{unknown[1]}: is not a known key"
    return _one_line(f"{path}: {cause}" if path else cause)


def _one_line(text: str) -> str:
    return " ".join(text.split())
