"""Layout fingerprints: whether a reader can use the blocks of a writer, and what the conversion costs.

The check happens before any byte moves. Each side describes its blocks in the same terms, for every engine and every
maker of accelerators. `negotiate` compares two descriptions and returns one of three results:

- `Identical`: each rank finds its bytes as it needs them.
- `Convertible`: the same values in another layout, or divided among another number of ranks. The result has the plan of
  each reading rank, and the cost per block for whoever chooses the pair (router, planner).
- `Incompatible`: not the same values. It names the first field that differs.

A description has a version. Whatever this version cannot prove equal is incompatible.
"""

from msgspec import Struct

from kvstore.block import HashAlgorithm
from kvstore.errors import LayoutMismatch
from kvstore.layouts.repack import RepackPlan, plan_fill
from kvstore.layouts.shards import BlockShape, shards_by_rank
from kvstore.namespace import AT_REST, KvNamespace

FINGERPRINT_VERSION = 1

MAX_TP = 1024
"""Most ranks of one side: ten times as many as any engine uses, and few enough that a peer's description costs at most a
second.
"""

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
"""Fields in the order in which a difference is reported; the fields that a person would check first come first."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """Description of one side's blocks and of its objects: one object per rank, with all layers."""

    version: int = FINGERPRINT_VERSION
    model: str
    revision: str
    lora: str = ""
    dtype: str
    element_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int  # heads of the whole model
    head_dim: int  # elements per head and token, keys and values together
    layout: str  # layout of one rank's object, see `kvstore.namespace`
    tp: int = 1  # number of ranks that share the heads; 1 means a whole-model object
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
        """True if these blocks lie as a store keeps them: one whole-model object each, without any conversion."""
        return self.layout == AT_REST and self.tp == 1

    @property
    def at_rest(self) -> KvNamespace:
        """Namespace of these blocks in a store; the layout and ranks of this side are not part of it."""
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
    """Cost of converting one block for all ranks of the reader; the slowest rank counts if they work at the same time."""

    bytes: int  # bytes moved for all ranks; more than the block if ranks hold the same heads
    runs: int  # contiguous pieces on both sides, for all ranks
    bytes_a_rank: int  # bytes of the rank that moves most
    runs_a_rank: int

    def seconds(self, *, bytes_per_second: float, seconds_per_run: float) -> float:
        """Return how long a block takes when each rank moves its own shard."""
        return self.bytes_a_rank / bytes_per_second + self.runs_a_rank * seconds_per_run


class Identical(Struct, frozen=True):
    """Rank r of the reader uses the object of the writer's rank r as it is."""


class Convertible(Struct, frozen=True):
    plans: tuple[RepackPlan, ...]  # one for each reading rank; the sources are the writer's objects in order of rank
    cost: ConversionCost


class Incompatible(Struct, frozen=True):
    field: str  # name of a field of `Fingerprint`
    reason: str

    def error(self) -> LayoutMismatch:
        return LayoutMismatch(self.field, self.reason)


Agreement = Identical | Convertible | Incompatible


def describe(namespace: KvNamespace, *, layout: str | None = None, tp: int = 1) -> Fingerprint:
    """Return the description of one side; `layout` None means the layout at rest.

    Raise LayoutMismatch if the namespace's block size does not follow from its other fields.
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
    """Compare two descriptions. Never raises, because descriptions may come from a peer."""
    for field in MUST_BE_EQUAL:
        written, wanted = getattr(writer, field), getattr(reader, field)
        if written != wanted:
            return Incompatible(field, f"{field}: {written!r} is written, {wanted!r} is read")
    if writer.version != FINGERPRINT_VERSION:
        return Incompatible("version", f"version: {writer.version} is not known here, {FINGERPRINT_VERSION} is")
    for side in (writer, reader):
        if side.tp > MAX_TP:
            return Incompatible("tp", f"tp: {side.tp} ranks are more than {MAX_TP}")
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
