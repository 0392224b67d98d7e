"""KV namespace of a vLLM engine. The worker and both sides of the KV connector compute it by this module, so they always agree."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import LayoutMismatch
from kvstore.namespace import KvNamespace
from workers.engines.weights import revision_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def weights_revision(model_dir: Path) -> str:
    """Return a digest of a model folder's configuration and weights (`workers.engines.weights.revision_of`)."""
    return revision_of(
        [model_dir / "config.json", *model_dir.glob("*.safetensors"), *model_dir.glob("*.safetensors.index.json")]
    )


def namespace_of(config: "VllmConfig", *, model: str, revision: str) -> KvNamespace:
    """Return the namespace of the blocks of an engine with this configuration.

    Args:
        config: vLLM's configuration, made from its arguments.
        model: Name of the model in clients' requests.
        revision: Result of `weights_revision`.
    """
    import torch  # noqa: PLC0415 - slow to import, and only processes with an engine need it

    model_config = config.model_config
    cache_dtype = config.cache_config.cache_dtype
    dtype = str(model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    known = getattr(torch, dtype, None)
    # torch has no type of this name for "fp8", whose elements have one byte, and for types that `launch.check_model`
    # refuses if the worker has a store. One byte is assumed for all of them.
    element_bytes = known.itemsize if known is not None else 1
    block_tokens = config.cache_config.block_size
    layers = model_config.get_num_layers(config.parallel_config)
    # A head holds keys and values. Latent KV (MLA) has only one vector for keys and values together, and every rank has
    # the whole vector.
    kv_heads = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
    head_dim = model_config.get_head_size() * (1 if model_config.use_mla else 2)
    # Options that change the KV values although the weights are the same.
    overrides = json.dumps(model_config.hf_overrides, sort_keys=True, default=str) if model_config.hf_overrides else ""
    quantization = model_config.quantization or ""
    variant = f"{overrides}|{quantization}{_rotation(model_config)}"
    if variant != "|":
        revision = hashlib.sha256(f"{revision}|{variant}".encode()).hexdigest()[:32]
    return KvNamespace(
        model=model,
        revision=revision,
        dtype=dtype,
        block_tokens=block_tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_bytes=layers * kv_heads * block_tokens * head_dim * element_bytes,
    )


def _rotation(model: "ModelConfig") -> str:
    """Return a text that names the rotary factors of a longrope model; empty for other models.

    Such a model has two sets of factors, for short and for long contexts. vLLM chooses one of them by `max_model_len`.
    """
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for rope in [parameters, *parameters.values()]:  # in some models the parameters are nested by the kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            return "|long" if model.max_model_len > rope.get("original_max_position_embeddings", 0) else "|short"
    return ""


def check_groups(groups: "KVCacheConfig") -> None:
    """Refuse blocks that the store cannot hold: several kinds, or blocks that vLLM drops while their request runs.

    Raises:
        LayoutMismatch: vLLM has chosen such blocks. This is known only while vLLM starts, when it has chosen its groups.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415 - slow to import

    specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise LayoutMismatch(
            "store", f"store: KV blocks of {kinds}; the store holds those of full attention, of one kind"
        )
