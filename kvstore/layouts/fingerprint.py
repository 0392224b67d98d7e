"""The handshake before any byte moves: can this reader use what that writer keeps, and what does it cost?

Each side describes its blocks in the same words, whatever engine or maker of accelerators it runs on. `negotiate` compares
two descriptions and answers one of three things:

- `Identical`: every rank finds its bytes as it needs them.
- `Convertible`: the same values in another layout or shared out among another number of ranks. The answer holds the
  plan of each reading rank, and what a block costs, for whoever has to choose (router, planner).
- `Incompatible`: not the same values. It names the first field that differs.

A description is versioned: what this version cannot know to be equal, it refuses.
"""

from msgspec import Struct

from kvstore.block import HashAlgorithm
from kvstore.errors import LayoutMismatch
from kvstore.layouts.repack import RepackPlan, plan_fill
from kvstore.layouts.shards import BlockShape, shards_by_rank
from kvstore.namespace import AT_REST, KvNamespace

FINGERPRINT_VERSION = 1

MAX_TP = 1024
"""Ranks of one side; ten times what any engine uses, and few enough that a peer's description costs no more than a second."""

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
"""In the order in which a difference is reported: what a person would look at first comes first."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """What one side's blocks are, and how they lie in its objects: one object a rank, all layers in it."""

    version: int = FINGERPRINT_VERSION
    model: str
    revision: str
    lora: str = ""
    dtype: str
    element_bytes: int
    block_tokens: int
    layers: int
    kv_heads: int  # of the whole model
    head_dim: int  # elements a head and token, keys and values together
    layout: str  # of one rank's object, see `kvstore.namespace`
    tp: int = 1  # ranks that the heads are shared out among; 1 is a whole-model object
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
        """Whether these blocks lie as a store keeps them: one whole-model object each, and nothing to convert."""
        return self.layout == AT_REST and self.tp == 1

    @property
    def at_rest(self) -> KvNamespace:
        """The namespace in a store of blocks like these; it says nothing of the layout and ranks of this side."""
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
    """Of converting one block for all ranks of the reader; the worst rank counts where they work at the same time."""

    bytes: int  # moved for all ranks; more than the block where ranks hold the same heads
    runs: int  # pieces that are contiguous on both sides, for all ranks
    bytes_a_rank: int  # of the rank that moves most
    runs_a_rank: int

    def seconds(self, *, bytes_per_second: float, seconds_per_run: float) -> float:
        """How long a block takes when every rank moves its own share."""
        return self.bytes_a_rank / bytes_per_second + self.runs_a_rank * seconds_per_run


class Identical(Struct, frozen=True):
    """Rank r of the reader uses the object of rank r of the writer as it is."""


class Convertible(Struct, frozen=True):
    plans: tuple[RepackPlan, ...]  # one a reading rank; sources are the writer's objects in order of rank
    cost: ConversionCost


class Incompatible(Struct, frozen=True):
    field: str  # of `Fingerprint`
    reason: str

    def error(self) -> LayoutMismatch:
        return LayoutMismatch(self.field, self.reason)


Agreement = Identical | Convertible | Incompatible


def describe(namespace: KvNamespace, *, layout: str | None = None, tp: int = 1) -> Fingerprint:
    """The description of one side.

    Args:
        namespace: Whose blocks it writes or reads.
        layout: Of one rank's object; None: as at rest.
        tp: Number of ranks.

    Raises:
        LayoutMismatch: The namespace's block size does not follow from its other fields.
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
    """See the module. Never raises; descriptions may come from a peer."""
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
