"""The model that the simulated engine runs: no layers, no weights, but KV bytes that matter.

Rules:

1. The KV bytes of block i are expand(H(weights ‖ D(i-1) ‖ tokens of block i)), where D(i) = H(D(i-1) ‖ the bytes that
   block i really has in memory) and D(-1) is a constant. So a block depends on everything before it, as attention
   makes it do. The bytes are by layer, head, token and element; where each lies is `workers.engines.simulated.layout`.
2. The next token is f(H(weights ‖ D of the last full block ‖ tokens after it ‖ what shapes the choice)) mod vocabulary.
   So one wrong, missing or swapped block anywhere in the context changes what is generated.
3. Expansion is numpy's Philox keyed by the digest, whose raw stream is fixed by its specification (Salmon et al. 2011);
   digests are XXH3-128: nothing here has to withstand an adversary, and a block has to cost microseconds.
"""

import struct

import numpy as np
import xxhash
from msgspec import Struct

from fleet.core.requests import Logprobs, Sampling

Digest = bytes
"""16 bytes: all KV bytes up to the end of some block."""

_BEGINNING: Digest = xxhash.xxh3_128_digest(b"fleet.simulated.v1")
_WORD_BYTES = 8
_SHAPE = struct.Struct("<ddqd?Q")


class SampledToken(Struct, frozen=True):
    """One sampled token."""

    token: int
    ends: bool  # an end of sequence


class SimulatedModel(Struct, frozen=True, kw_only=True):
    """What would be the weights, and the tokens they know."""

    seed: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    eos_probability: float
    block_bytes: int  # a multiple of 8

    @property
    def beginning(self) -> Digest:
        """The digest before the first block."""
        return _BEGINNING

    def beginning_with(self, adapter: str) -> Digest:
        """The same with an adapter, by its identity: it changes everything that follows."""
        return xxhash.xxh3_128_digest(_BEGINNING + adapter.encode())

    def compute(self, before: Digest, tokens: bytes | bytearray) -> bytes:
        """KV bytes of the block that holds `tokens` and follows `before`."""
        key = xxhash.xxh3_128_intdigest(b"".join((b"block", before, tokens)), seed=self.seed)
        return np.random.Philox(key=key).random_raw(self.block_bytes // _WORD_BYTES).tobytes()

    def read(self, before: Digest, block: bytes | memoryview) -> Digest:
        """The digest after a block, from the bytes that it really has."""
        state = xxhash.xxh3_128(before)
        state.update(block)
        return state.digest()

    def draw(self, before: Digest, tail: bytes | bytearray, sampling: Sampling, *, may_end: bool) -> SampledToken:
        """The token after the blocks of `before` and the tokens of `tail`, which fill no block yet.

        The same every time for the same arguments: sampling parameters and the seed shape the choice, but there is no
        state, so any engine continues what another began.
        """
        material = b"".join((b"token", before, tail, b"/", _shape(sampling)))
        drawn = xxhash.xxh3_128_intdigest(material, seed=self.seed)
        chance, choice = drawn >> 64, drawn & 0xFFFFFFFFFFFFFFFF
        if may_end and self.eos_token_ids and chance < self.eos_probability * 2**64:
            return SampledToken(self.eos_token_ids[choice % len(self.eos_token_ids)], ends=True)
        token = choice % self.vocab_size
        while token in self.eos_token_ids:
            token = (token + 1) % self.vocab_size
        return SampledToken(token, ends=False)

    def logprobs(self, token: int, alternatives: int) -> Logprobs:
        """Pretended, but well-formed: they fall by half from the chosen token on."""
        ids = tuple((token + offset) % self.vocab_size for offset in range(min(alternatives, self.vocab_size)))
        values = tuple(-0.6931472 * (rank + 1) for rank in range(len(ids)))
        return Logprobs(chosen=-0.6931472, top_ids=ids, top=values)


def _shape(sampling: Sampling) -> bytes:
    """What of the sampling parameters shapes the choice; nothing when it is greedy."""
    if sampling.temperature == 0:
        return b""
    return _SHAPE.pack(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.seed is not None,
        sampling.seed or 0,
    )
