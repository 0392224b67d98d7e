"""What it costs that two sides keep blocks differently, for whoever chooses who works with whom: a router, a planner. Pure.

Rules:

1. The two sides are described by fingerprints, as workers tell them; nothing has to run, so that pairs that do not exist yet
   can be weighed.
2. Blocks take one of two ways. By the store both sides convert, each between its own memory and the layout at rest (ADR
   0012). Directly, the reader alone would, from the writer's memory into its own. Where two are alike nobody does.
3. Ranks of one side work at the same time, so that the one with the most to do counts. The sides work one after the other.
4. A conversion takes what its bytes and its runs take; a run is a piece that is contiguous on both sides
   (`kvstore.repack`). How fast a core is at both is told by `Speed`.
"""

from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from kvstore.fingerprint import Agreement, ConversionCost, Convertible, Fingerprint, Identical, Incompatible, negotiate
from kvstore.layout import AT_REST


class Way(StrEnum):
    """How blocks get from one side to the other."""

    STORE = "store"
    DIRECT = "direct"


class Speed(Struct, frozen=True, kw_only=True):
    """Of one core that converts.

    The defaults are a fit to what the native kernels did on one core of an AMD EPYC, November 2026: within a third for blocks
    of 2 to 8 MiB in runs of 256 bytes to 16 KiB.
    """

    bytes_per_second: float = 8e9
    seconds_per_run: float = 1e-8


class PairCost(Struct, frozen=True, kw_only=True):
    """Of blocks on their way from a writer to a reader, beyond what they cost between two that are alike."""

    bytes: int = 0  # put elsewhere, by all ranks of both sides
    writer_seconds: float = 0.0
    reader_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.writer_seconds + self.reader_seconds

    def times(self, blocks: int) -> "PairCost":
        """The cost of so many blocks: of a prompt, or of all that some workers hand over in a second."""
        return PairCost(
            bytes=blocks * self.bytes,
            writer_seconds=blocks * self.writer_seconds,
            reader_seconds=blocks * self.reader_seconds,
        )


def pair_cost(
    *, writer: Fingerprint, reader: Fingerprint, way: Way = Way.STORE, speed: Speed | None = None
) -> PairCost | Incompatible:
    """What one block costs between two sides, or why it cannot pass. Never raises; descriptions may come from a peer.

    Args:
        writer: Of blocks: a prefill worker, say.
        reader: Of blocks: a decode worker, say.
        way: That they take.
        speed: Of a core on either side; None: as `Speed` has it.
    """
    speed = speed or Speed()
    agreement = negotiate(writer=writer, reader=reader)
    if isinstance(agreement, Incompatible):
        return agreement
    if way is Way.DIRECT:
        cost = _cost(agreement)
        return PairCost(bytes=cost.bytes, reader_seconds=_seconds(cost, speed))
    stored = replace(writer, layout=AT_REST, tp=1)
    writing, reading = _cost(negotiate(writer=stored, reader=writer)), _cost(negotiate(writer=stored, reader=reader))
    block_bytes = writer.at_rest.block_bytes
    return PairCost(
        bytes=min(writing.bytes, block_bytes) + reading.bytes,  # of ranks that hold the same heads, one writes them
        writer_seconds=_seconds(writing, speed),
        reader_seconds=_seconds(reading, speed),
    )


NOTHING = ConversionCost(bytes=0, runs=0, bytes_a_rank=0, runs_a_rank=0)


def _cost(agreement: Agreement) -> ConversionCost:
    match agreement:
        case Identical():
            return NOTHING
        case Convertible(cost=cost):
            return cost
        case Incompatible():
            raise AssertionError(f"two that agree both agree with the layout at rest: {agreement.reason}")
        case _:
            assert_never(agreement)


def _seconds(cost: ConversionCost, speed: Speed) -> float:
    return cost.seconds(bytes_per_second=speed.bytes_per_second, seconds_per_run=speed.seconds_per_run)
