"""LoRA adapters of a vLLM engine: derives vLLM's arguments and requests from the adapters in the worker's settings.

vLLM itself loads an adapter, when the first request for it runs. `lora_request` tells vLLM which one.
"""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.core.work import LoraAdapter
from kvstore.recent_map import RecentMap
from workers.engines.weights import revision_of
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the largest LoRA rank (its `MaxLoRARanks`)."""


class LoadedAdapters:
    """Estimates which adapters vLLM has loaded.

    It assumes that vLLM drops the least recently used adapter if requests use more adapters than there are slots.
    """

    def __init__(self, slots: int) -> None:
        self._used: RecentMap[str, None] = RecentMap(slots)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._used)

    def use(self, name: str) -> None:
        self._used.note(name, None)


class AdapterFiles:
    """Detects adapters whose files have changed since the worker started; the engine then rejects requests for these adapters.

    At its start, the worker sends routers a digest of each adapter's weights, and block hashes depend on this digest.
    vLLM reads the files only when a request needs the adapter, perhaps days later and more than once. With changed
    weights it would compute other KV under the same block hashes, and other workers would load these wrong blocks from
    a store.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._folders = {name: Path(folder) for name, folder in settings.adapters.items()}
        self._described = {name: _stamps(folder) for name, folder in self._folders.items()}
        self._changed: set[ModelName] = set()

    def are_as_described(self, name: str) -> bool:
        """Return whether the adapter's files have never changed since the start.

        Changes are noticed by inodes, sizes and modification times.
        """
        model = ModelName(name)
        if model not in self._changed and _stamps(self._folders[model]) != self._described[model]:
            log.error("adapter files changed, restart the worker to serve it again", extra={"adapter": name})
            self._changed.add(model)
        return model not in self._changed


def adapters_of(settings: WorkerSettings) -> tuple[LoraAdapter, ...]:
    """Return the adapters, each with a digest of its configuration and weights.

    Raises:
        ConfigurationRefused: A folder has no adapter; the message names the adapter and the missing or unusable file.
    """
    return tuple(LoraAdapter(ModelName(name), _revision(name, folder)) for name, folder in settings.adapters.items())


def engine_arguments(settings: WorkerSettings) -> dict[str, Any]:
    """Return vLLM's arguments for the adapters.

    Raises:
        ConfigurationRefused: A folder has no adapter, or the largest LoRA rank is more than vLLM takes.
    """
    if not settings.adapters:
        return {}
    rank = max(_rank(name, folder) for name, folder in settings.adapters.items())
    if rank > RANKS[-1]:
        raise ConfigurationRefused(f"adapters: a rank of {rank} is more than vLLM takes, {RANKS[-1]}")
    return {
        "enable_lora": True,
        "max_loras": settings.adapter_slots,
        "max_lora_rank": next(each for each in RANKS if each >= rank),
    }


def lora_request(name: str, settings: WorkerSettings) -> "LoRARequest | None":
    """Return the LoRA adapter of an attempt in vLLM's form; None if the attempt uses no adapter."""
    if not name:
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow to import

    number = list(settings.adapters).index(ModelName(name)) + 1
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=settings.adapters[ModelName(name)])


def _revision(name: str, folder: str) -> str:
    _rank(name, folder)
    return revision_of(_files(Path(folder)))


def _files(folder: Path) -> list[Path]:
    return sorted([folder / "adapter_config.json", *folder.glob("*.safetensors")])


def _stamps(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return name, inode, size and modification time of each file of an adapter, by which changes are noticed.

    The result is empty if a file is missing.
    """
    try:
        found = [(file.name, file.stat()) for file in _files(folder)]
    except OSError:
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _rank(name: str, folder: str) -> int:
    file = Path(folder) / "adapter_config.json"
    try:
        rank = json.loads(file.read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationRefused(f"adapters.{name}: {file} does not describe an adapter: {error}") from error
    if not isinstance(rank, int) or rank < 1:
        raise ConfigurationRefused(f"adapters.{name}: {file} has the rank {rank!r}")
    return rank
