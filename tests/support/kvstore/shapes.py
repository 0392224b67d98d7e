"""Builders of KV block shapes and namespaces with valid defaults, without a node."""

from typing import Any

from kvstore.layouts.shards import BlockShape, BlockShard, Box, Span
from kvstore.messages import BlockKey
from kvstore.namespace import ELEMENT_BYTES, KvNamespace


def a_shape(**sizes: int) -> BlockShape:
    return BlockShape(**{"layers": 2, "kv_heads": 4, "block_tokens": 4, "head_dim": 8, "element_bytes": 2, **sizes})


def one_part_per_layer(layout: str, box: Box) -> list[BlockShard]:
    """Return the shards of an engine that keeps each layer in its own tensor, in the order of the layers."""
    return [BlockShard(layout, Box(Span(layer, 1), box.heads)) for layer in range(box.layers.first, box.layers.end)]


def a_typed_namespace(dtype: str = "bfloat16", **fields: Any) -> KvNamespace:
    """Return a namespace of small blocks whose size fits the dtype; an unknown dtype needs `block_bytes`."""
    sizes = {"layers": 2, "kv_heads": 4, "block_tokens": 16, "head_dim": 32}
    sizes |= {name: fields.pop(name) for name in tuple(fields) if name in sizes}
    count = sizes["layers"] * sizes["kv_heads"] * sizes["block_tokens"] * sizes["head_dim"]
    block_bytes = count * ELEMENT_BYTES.get(dtype, 0)
    defaults = {"model": "tiny", "revision": "r1", "dtype": dtype, "block_bytes": block_bytes, **sizes}
    return KvNamespace(**{**defaults, **fields})


def a_key(namespace: KvNamespace, name: str = "a") -> BlockKey:
    return BlockKey(namespace.digest, f"{name:>16.16}".encode())
