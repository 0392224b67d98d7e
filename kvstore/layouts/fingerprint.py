"""Fingerprint: describes the meaning and the memory layout of blocks, and compares two descriptions.

A reader and a writer of blocks, such as an engine and a store, have one fingerprint each. Each rank of an engine has
its part of a block in one object, a contiguous piece of memory. A store has one object with the whole block.

`negotiate` finds out whether a reader can use a writer's blocks, and at what cost. It returns one of three answers:

- `Identical`: the writer's objects have the form that the reader's ranks need.
- `Convertible`: the values are the same, in another layout or divided among another number of ranks. The answer has a
  plan for each rank of the reader, and the cost per block.
- `Incompatible`: the values differ, or a fingerprint is invalid. The answer names the first such field.

Fingerprints have a version; fingerprints of different versions are incompatible.
"""

from msgspec import Struct

from kvstore.block import HashAlgorithm
from kvstore.errors import LayoutMismatch
from kvstore.layouts.repack import RepackPlan, plan_fill
from kvstore.layouts.shards import BlockShape, shards_by_rank
from kvstore.namespace import AT_REST, KvNamespace

FINGERPRINT_VERSION = 1

MAX_TP = 1024
"""Maximum number of ranks of a reader or writer. It is ten times what any engine uses, and with it `negotiate` takes at
most a second."""

MUST_BE_EQUAL = (
    "version",
    "model",
    "revision",
    "lora",
    "dtype",
    "element_bytes",
    "block_tokens",
    "layers",
    "kv_heads",
    "head_dim",
    "hash_algorithm",
)
"""Fields in which writer and reader must be equal. The first field that differs is reported, so the most obvious fields
come first."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """Describes the blocks of one reader or writer.

    Each rank of the reader or writer has one object with all layers of the rank's heads.
    """

    version: int = FINGERPRINT_VERSION
    model: str
    revision: str
    lora: str = ""
    dtype: str
    element_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int  # number of KV heads of the whole model
    head_dim: int  # number of elements of a head for one token, keys and values together
    layout: str  # layout of a rank's object, as `kvstore.namespace` defines layouts
    tp: int = 1  # number of ranks among which the heads are divided; 1: one object has all heads
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256_128

    @property
    def shape(self) -> BlockShape:
        return BlockShape(
            layers=self.layers,
            kv_heads=self.kv_heads,
            block_tokens=self.block_tokens,
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
        )

    @property
    def is_at_rest(self) -> bool:
        """True if the blocks have the form of the store, so that nothing is converted."""
        return self.layout == AT_REST and self.tp == 1

    @property
    def at_rest(self) -> KvNamespace:
        """Namespace of these blocks in a store. It is the same for all layouts and numbers of ranks of engines."""
        shape = self.shape
        return KvNamespace(
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            lora=self.lora,
            hash_algorithm=self.hash_algorithm,
            block_bytes=shape.bytes_of(shape.everything),
        )


class ConversionCost(Struct, frozen=True, kw_only=True):
    """Cost of converting one block for all ranks of the reader."""

    bytes: int  # number of bytes that all ranks copy; larger than a block if several ranks hold the same heads
    runs: int  # number of pieces that all ranks copy; a piece is contiguous in the source and in the destination
    bytes_a_rank: int  # number of bytes that the rank with the most bytes copies
    runs_a_rank: int

    def seconds(self, *, bytes_per_second: float, seconds_per_run: float) -> float:
        """Return the seconds to convert a block if all ranks copy their shards at the same time."""
        return self.bytes_a_rank / bytes_per_second + self.runs_a_rank * seconds_per_run


class Identical(Struct, frozen=True):
    """Answer of `negotiate`: each rank r of the reader can use the object of the writer's rank r unchanged."""


class Convertible(Struct, frozen=True):
    # one plan for each rank of the reader; the sources are the writer's objects in order of rank
    plans: tuple[RepackPlan, ...]
    cost: ConversionCost


class Incompatible(Struct, frozen=True):
    field: str  # name of a field of `Fingerprint`
    reason: str

    def error(self) -> LayoutMismatch:
        return LayoutMismatch(self.field, self.reason)


Agreement = Identical | Convertible | Incompatible


def describe(namespace: KvNamespace, *, layout: str | None = None, tp: int = 1) -> Fingerprint:
    """Make the fingerprint of a reader or writer with `tp` ranks, each of which has one object in `layout`.

    If `layout` is None, the objects have the layout of the namespace.

    Raises:
        LayoutMismatch: The namespace's block size does not match its other fields.
    """
    shape = BlockShape.of(namespace)
    return Fingerprint(
        model=namespace.model,
        revision=namespace.revision,
        lora=namespace.lora,
        dtype=namespace.dtype,
        element_bytes=shape.element_bytes,
        block_tokens=namespace.block_tokens,
        layers=namespace.layers,
        kv_heads=namespace.kv_heads,
        head_dim=namespace.head_dim,
        layout=namespace.layout if layout is None else layout,
        tp=tp,
        hash_algorithm=namespace.hash_algorithm,
    )


def negotiate(*, writer: Fingerprint, reader: Fingerprint) -> Agreement:
    """Return an answer that says whether the reader can use the writer's blocks, and at what cost.

    For an invalid fingerprint, return `Incompatible` instead of raising an exception, because a fingerprint may come
    from another process.
    """
    for field in MUST_BE_EQUAL:
        written, wanted = getattr(writer, field), getattr(reader, field)
        if written != wanted:
            return Incompatible(field, f"{field}: {written!r} is written, {wanted!r} is read")
    if writer.version != FINGERPRINT_VERSION:
        return Incompatible("version", f"version: {writer.version} is unknown here; use {FINGERPRINT_VERSION}")
    for side in (writer, reader):
        if side.tp > MAX_TP:
            return Incompatible("tp", f"tp: {side.tp} ranks are more than the limit of {MAX_TP}")
    for field in ("element_bytes", "block_tokens", "layers", "kv_heads", "head_dim"):
        if getattr(writer, field) < 1:
            return Incompatible(field, f"{field}: must be at least 1")
    try:
        plans = _plans(writer, reader)
    except LayoutMismatch as error:
        return Incompatible(error.field, str(error))
    if (writer.layout, writer.tp) == (reader.layout, reader.tp):
        return Identical()
    cost = ConversionCost(
        bytes=sum(plan.bytes for plan in plans),
        runs=sum(plan.run_count for plan in plans),
        bytes_a_rank=max(plan.bytes for plan in plans),
        runs_a_rank=max(plan.run_count for plan in plans),
    )
    return Convertible(plans, cost)


def _plans(writer: Fingerprint, reader: Fingerprint) -> tuple[RepackPlan, ...]:
    sources = shards_by_rank(writer.shape, writer.layout, writer.tp)
    destinations = shards_by_rank(reader.shape, reader.layout, reader.tp)
    return tuple(
        plan_fill(writer.shape, sources, [part], first=rank * writer.tp // reader.tp)
        for rank, part in enumerate(destinations)
    )
