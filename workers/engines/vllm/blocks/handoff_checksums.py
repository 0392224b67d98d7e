"""Handoff checksums: the checksums of the blocks that a prefill engine hands over in memory, and their comparison.

This module does not use vLLM. `workers.engines.vllm.blocks.nixl_connector` connects it to vLLM.

Rules:

1. Each rank of the prefill engine computes the CRC-32C of its part of each block of the prompt, in the step that
   computes the prompt's last token. The checksums travel in the handoff and not together with the blocks.
2. Each rank of the decode engine compares the blocks that it has pulled, before vLLM may schedule the request. A block
   with another checksum is reported to vLLM as not loaded. vLLM then computes this block and all later ones.
3. Checksums belong to positions in the prompt. A block that arrived whole, but at the wrong position, counts as corrupt.
4. A block whose checksum the decode engine does not know is used, and counts as unverified. The checksum is not known
   if the prefill engine computes none, for example because it has an earlier version. It is also unknown if the two
   engines differ in the number of ranks or in the block size.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from fleet.core.work import PulledBlocks
from kvstore.block import blocks_for

log = logging.getLogger(__name__)

CHECKSUMS = "fleet_checksums"
"""Key in a handoff's transfer parameters; its value is a `HandoffChecksums`, as an object of JSON."""

ALGORITHM = "crc32c"
CHECKSUM_BYTES = 4

ChecksumFunction = Callable[[Sequence[int]], Sequence[int]]
"""A function that returns the checksums of some of the engine's blocks, by their numbers."""


class HandoffChecksums(Struct, frozen=True):
    """Checksums of a prompt's blocks, of all ranks of the prefill engine."""

    algorithm: str
    block_tokens: int
    ranks: list[str]  # for each rank: the checksums of its parts of the blocks, in the form that `encoded` returns

    def of_rank(self, rank: int, *, ranks: int, block_tokens: int) -> list[int]:
        """Return the checksums for a rank of a decode engine with `ranks` ranks; empty if they do not fit its blocks."""
        if (self.algorithm, self.block_tokens, len(self.ranks)) != (ALGORITHM, block_tokens, ranks):
            return []
        return decoded(self.ranks[rank])


def encoded(checksums: Sequence[int]) -> str:
    """Return checksums as hexadecimal digits, eight for each."""
    return b"".join([checksum.to_bytes(CHECKSUM_BYTES) for checksum in checksums]).hex()


def decoded(text: str) -> list[int]:
    """Return the checksums in a text that `encoded` has made; an empty list if the text is malformed."""
    try:
        octets = bytes.fromhex(text)
    except ValueError:
        return []
    if len(octets) % CHECKSUM_BYTES:
        return []
    return [int.from_bytes(octets[at : at + CHECKSUM_BYTES]) for at in range(0, len(octets), CHECKSUM_BYTES)]


def checksums_in(params: Mapping[str, Any]) -> HandoffChecksums | None:
    """Return the checksums in a handoff's transfer parameters; None if there are none, or if they are malformed."""
    try:
        return msgspec.convert(params.get(CHECKSUMS), HandoffChecksums)
    except msgspec.ValidationError:
        return None


class PrefillRequest(Protocol):
    """The attributes of vLLM's `Request` that `HandedChecksums` reads."""

    request_id: str
    all_token_ids: Sequence[int]
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None


class HandedChecksums:
    """Adds checksums to the handoffs of a prefill engine, in the process of its scheduler.

    In each step, vLLM first ends the requests whose first token was generated (`finished`). Then it passes on the reports of
    the ranks (`computed`), and at last it sends the outputs of the step. Therefore `finished` puts an empty list into the
    handoff, and `computed` adds the checksums of each rank to this list.
    """

    def __init__(self, *, block_tokens: int, ranks: int):
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._requests: dict[str, PrefillRequest] = {}
        self._unfilled: dict[str, list[str]] = {}  # by request: the empty list in its handoff, which `computed` fills

    def arrived(self, request: PrefillRequest) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._requests[request.request_id] = request

    def planned(
        self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int]]
    ) -> dict[str, list[int]]:
        """Return for each request the numbers of the blocks whose checksums the ranks have to compute after this step.

        `scheduled` maps each request of the step to the number of its tokens that the step computes.
        """
        orders: dict[str, list[int]] = {}
        for request_id, request in self._requests.items():
            tokens = len(request.all_token_ids)
            if request_id in scheduled and request.num_computed_tokens + scheduled[request_id] >= tokens:
                orders[request_id] = list(block_ids_of(request_id)[: blocks_for(tokens, self._block_tokens)])
        return orders

    def finished(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Forget a request. If it ends with a handoff, `params` are the handoff's transfer parameters."""
        if self._requests.pop(request_id, None) is None or not (params or {}).get("do_remote_prefill"):
            return
        assert params is not None
        ranks = self._unfilled[request_id] = []
        params[CHECKSUMS] = {"algorithm": ALGORITHM, "block_tokens": self._block_tokens, "ranks": ranks}

    def computed(self, checksums: Mapping[str, Mapping[int, str]]) -> None:
        """Fill the handoffs of this step with the ranks' checksums, by request and rank.

        A handoff stays without checksums if a rank has computed none.
        """
        for request_id, ranks in self._unfilled.items():
            of_ranks = checksums.get(request_id, {})
            if len(of_ranks) == self._ranks:
                ranks += [of_ranks[rank] for rank in range(self._ranks)]
        self._unfilled.clear()


class _Pull(Struct, frozen=True):
    """Describes the blocks that are being pulled for a request; a checksum is None if it is unknown."""

    block_ids: list[int]
    expected: list[int | None]


class PulledChecks:
    """Compares the blocks that one rank of a decode engine has pulled with the checksums of the handoffs."""

    def __init__(self, checksums_of: ChecksumFunction | None):
        """Start without pulls; `checksums_of` is None if the engine's blocks cannot be checked."""
        self._checksums_of = checksums_of
        self._pulls: dict[str, _Pull] = {}
        self._corrupt: set[int] = set()
        self._counts = PulledBlocks()

    def began(self, request_id: str, block_ids: Sequence[int], *, first: int, checksums: Sequence[int]) -> None:
        """Record that blocks are being pulled.

        Args:
            request_id: The request to whose prompt the blocks belong.
            block_ids: Numbers of the engine's blocks that are being filled.
            first: Position in the prompt of the first pulled block; the engine has the blocks before it.
            checksums: Checksums of the blocks of the prompt from position 0 on; empty if they are unknown.
        """
        known = list(checksums[first : first + len(block_ids)])
        unknown = [None] * (len(block_ids) - len(known))
        self._pulls[request_id] = _Pull(list(block_ids), [*known, *unknown])

    def ended(self, request_ids: Collection[str], *, failed: Collection[str]) -> None:
        """Check the blocks of the pulls that have ended; vLLM already knows that the `failed` ones brought no blocks."""
        for request_id in request_ids:
            pull = self._pulls.pop(request_id, None)
            if pull is not None and request_id not in failed:
                self._check(request_id, pull)

    def take_corrupt(self) -> set[int]:
        """Return the numbers by which the engine knows the blocks that were found corrupt since the last call."""
        corrupt, self._corrupt = self._corrupt, set()
        return corrupt

    def take_counts(self) -> PulledBlocks:
        """Return the numbers of the blocks whose pulls have ended since the last call, by the result of their check."""
        counts, self._counts = self._counts, PulledBlocks()
        return counts

    def _check(self, request_id: str, pull: _Pull) -> None:
        known = [
            (block_id, expected)
            for block_id, expected in zip(pull.block_ids, pull.expected, strict=True)
            if expected is not None and self._checksums_of is not None
        ]
        corrupt: list[int] = []
        if known:
            assert self._checksums_of is not None
            found = self._checksums_of([block_id for block_id, _ in known])
            corrupt = [block_id for (block_id, right), real in zip(known, found, strict=True) if right != real]
        if corrupt:
            log.warning("kv block checksum mismatch", extra={"request": request_id, "blocks": len(corrupt)})
        self._corrupt.update(corrupt)
        self._counts = self._counts + PulledBlocks(
            verified=len(known) - len(corrupt), corrupt=len(corrupt), unverified=len(pull.block_ids) - len(known)
        )
