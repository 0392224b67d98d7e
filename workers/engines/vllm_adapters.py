"""Adapters (LoRA) of a vLLM engine: what its settings name, in its terms."""

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.errors import ConfigurationRefused
from fleet.ids import ModelName
from fleet.work import Adapter
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be told (its `MaxLoRARanks`)."""


class UsedAdapters:
    """The adapters that vLLM has loaded, as far as can be told from outside: it drops the one used longest ago."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._used: OrderedDict[str, None] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._used)

    def use(self, name: str) -> None:
        self._used[name] = None
        self._used.move_to_end(name)
        if len(self._used) > self._slots:
            self._used.popitem(last=False)


def adapters_of(settings: WorkerSettings) -> tuple[Adapter, ...]:
    """The adapters, each with a digest of its configuration and weights.

    Raises:
        ConfigurationRefused: Names the one that is no adapter.
    """
    return tuple(Adapter(ModelName(name), _revision(name, folder)) for name, folder in settings.adapters.items())


def engine_arguments(settings: WorkerSettings) -> dict[str, Any]:
    """What vLLM has to be told about them.

    Raises:
        ConfigurationRefused: Names the one that is no adapter, or whose rank is too large.
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
    """The adapter of a piece of work; None for the model itself."""
    if not name:
        return None
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - heavy

    number = list(settings.adapters).index(ModelName(name)) + 1
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=settings.adapters[ModelName(name)])


def _revision(name: str, folder: str) -> str:
    _rank(name, folder)
    digest = hashlib.sha256()
    for file in sorted([Path(folder) / "adapter_config.json", *Path(folder).glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]


def _rank(name: str, folder: str) -> int:
    file = Path(folder) / "adapter_config.json"
    try:
        rank = json.loads(file.read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationRefused(f"adapters.{name}: {file} does not describe an adapter: {error}") from error
    if not isinstance(rank, int) or rank < 1:
        raise ConfigurationRefused(f"adapters.{name}: {file} has the rank {rank!r}")
    return rank
