"""Model of the simulated engine: a model without layers and weights, whose tokens depend on the KV bytes.

Rules:

1. The KV bytes of block i are expand(H(weights ‖ D(i-1) ‖ tokens of block i)), where D(i) = H(D(i-1) ‖ the bytes that
   block i really has in memory), and D(-1) is a constant for each LoRA adapter. Here ‖ joins bytes, H is the digest and
   expand is the expansion of rule 3, and the weights are the model's seed. A block therefore depends on everything before
   it, as with attention. The bytes are ordered by layer, head, token and element; `workers.engines.simulated.layout`
   places them.
2. The next token is drawn by the random number H(weights ‖ D of the last full block ‖ tokens after it ‖ the sampling
   parameters). One wrong, missing or swapped block anywhere in the context therefore changes the answer. Every token
   that does not end the answer has the logit 1, changed only by `logit_bias` and penalties. Tokens that are not
   allowed, or that would complete a forbidden sequence, are not sampled, unless no other token is left. It does not
   matter which engine sampled the earlier tokens, so any engine continues any answer exactly.
3. Expansion is numpy's generator Philox with the digest as its key. Its specification fixes its random numbers (Salmon
   et al. 2011), so every machine computes the same bytes. Digests are XXH3-128, because a block has to cost
   microseconds and no adversary is expected.
"""

import struct
from collections.abc import Collection

import numpy as np
import xxhash
from msgspec import Struct
from numpy.typing import NDArray

from fleet.core.requests import Logprobs, Pooling, PoolingTask, Sampling, TokenBytes, Vector

Digest = bytes
"""Digest of all KV bytes up to the end of a block; it has 16 bytes."""

_BEGINNING: Digest = xxhash.xxh3_128_digest(b"fleet.simulated.v1")
_WORD_BYTES = 8
_SHAPE = struct.Struct("<ddqd?Q")


class SampledToken(Struct, frozen=True):
    """One sampled token."""

    token: int
    ends: bool  # True if the token ends the sequence


class SimulatedModel(Struct, frozen=True, kw_only=True):
    """Computes KV bytes and tokens. The fields stand for the weights and the vocabulary of a real model."""

    seed: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    eos_probability: float
    block_bytes: int  # size of a block in bytes, a multiple of 8

    @property
    def beginning(self) -> Digest:
        """The digest before the first block of a sequence without a LoRA adapter: D(-1) of rule 1."""
        return _BEGINNING

    def beginning_with(self, adapter: str) -> Digest:
        """Return the digest before the first block of a sequence with a LoRA adapter: D(-1) of rule 1.

        All later digests depend on it, so they differ from those of other adapters.
        """
        return xxhash.xxh3_128_digest(_BEGINNING + adapter.encode())

    def compute(self, before: Digest, tokens: bytes | bytearray) -> bytes:
        """Return the KV bytes of a block of `tokens` that follows the blocks with the digest `before`."""
        key = xxhash.xxh3_128_intdigest(b"".join((b"block", before, tokens)), seed=self.seed)
        return np.random.Philox(key=key).random_raw(self.block_bytes // _WORD_BYTES).tobytes()

    def read(self, before: Digest, block: bytes | memoryview) -> Digest:
        """Return the digest after a block. `block` holds the bytes that the block really has in memory."""
        state = xxhash.xxh3_128(before)
        state.update(block)
        return state.digest()

    def draw(
        self,
        before: Digest,
        tail: bytes | bytearray,
        sampling: Sampling,
        *,
        may_end: bool,
        forbidden: Collection[int] = (),
        shifts: NDArray[np.float64] | None = None,
    ) -> SampledToken:
        """Sample the next token after a context: the full blocks of the digest `before`, then the tokens of `tail`.

        A token of `forbidden` is not sampled, unless no other token is left. The same arguments always give the same
        token. `may_end` is False if the answer must not end yet, so that no token of `eos_token_ids` is sampled.
        `shifts` is the result of `penalty_shifts`.
        """
        material = b"".join((b"token", before, tail, b"/", _shape(sampling)))
        drawn = xxhash.xxh3_128_intdigest(material, seed=self.seed)
        chance, choice = drawn >> 64, drawn & 0xFFFFFFFFFFFFFFFF
        if forbidden or sampling.logit_bias or sampling.allowed_token_ids or shifts is not None:
            return self._weighed(chance, choice, sampling, may_end=may_end, forbidden=forbidden, shifts=shifts)
        if may_end and self.eos_token_ids and chance < self.eos_probability * 2**64:
            return SampledToken(self.eos_token_ids[choice % len(self.eos_token_ids)], ends=True)
        token = choice % self.vocab_size
        while token in self.eos_token_ids:
            token = (token + 1) % self.vocab_size
        return SampledToken(token, ends=False)

    def penalty_shifts(self, sampling: Sampling, prompt: TokenBytes, answer: TokenBytes) -> NDArray[np.float64] | None:
        """Return how much the penalties change each token's logit, by vLLM's formula; None if there are no penalties.

        Args:
            sampling: The parameters.
            prompt: The tokens of the prompt.
            answer: The tokens of the answer so far.
        """
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        if presence == 0 and frequency == 0 and sampling.repetition_penalty == 1:
            return None
        counts = np.bincount(np.frombuffer(answer, "<u4"), minlength=self.vocab_size)
        shifts: NDArray[np.float64] = -frequency * counts - presence * (counts > 0)
        if sampling.repetition_penalty != 1:
            seen = counts > 0
            seen[np.frombuffer(prompt, "<u4")] = True
            shifts[seen] += 1 / sampling.repetition_penalty - 1
        return shifts

    def _weighed(
        self,
        chance: int,
        choice: int,
        sampling: Sampling,
        *,
        may_end: bool,
        forbidden: Collection[int],
        shifts: NDArray[np.float64] | None,
    ) -> SampledToken:
        weights = np.ones(self.vocab_size)
        ends = list(self.eos_token_ids)
        weights[ends] = self.eos_probability * self.vocab_size / max(1, len(ends)) if may_end else 0.0
        for token, bias in sampling.logit_bias:
            if token not in ends or may_end:
                weights[token] = (weights[token] or 1.0) * np.exp(bias)
        if shifts is not None:
            weights *= np.exp(shifts)
        if sampling.allowed_token_ids:
            allowed = np.zeros(self.vocab_size)
            allowed[list(sampling.allowed_token_ids)] = 1.0
            weights *= allowed
        weights[list(forbidden)] = 0.0
        sums = np.cumsum(weights)
        if sums[-1] == 0:  # all tokens are forbidden, so the sampler allows all of them again
            sums = np.cumsum(np.ones(self.vocab_size))
        drawn = ((chance ^ choice) / 2**64) * sums[-1]
        token = min(int(np.searchsorted(sums, drawn, side="right")), self.vocab_size - 1)
        return SampledToken(token, ends=may_end and token in ends)

    def vector(self, tokens: TokenBytes, pooling: Pooling, size: int) -> Vector:
        """Return the vector of a prompt, which depends only on the prompt's tokens, the weights and the parameters `pooling`.

        An embedding is a unit vector with the demanded number of dimensions; each prompt has a random direction of its
        own. A classification is one number from 0 to 1, such as the score of a pair of texts.
        """
        generator = np.random.Generator(np.random.Philox(key=xxhash.xxh3_128_intdigest(tokens, seed=self.seed)))
        if pooling.task is PoolingTask.CLASSIFY:
            return np.asarray([generator.random()], "<f4").tobytes()
        numbers = generator.standard_normal(size)[: pooling.dimensions or size]
        return (numbers / np.linalg.norm(numbers)).astype("<f4").tobytes()

    def logprobs(self, token: int, alternatives: int) -> Logprobs:
        """Return invented log probabilities of a token and its alternatives: each alternative is half as likely as the one before."""
        ids = tuple((token + offset) % self.vocab_size for offset in range(min(alternatives, self.vocab_size)))
        values = tuple(-0.6931472 * (rank + 1) for rank in range(len(ids)))
        return Logprobs(chosen=-0.6931472, top_ids=ids, top=values)


def _shape(sampling: Sampling) -> bytes:
    """Return the sampling parameters that go into the digest of rule 2, as bytes; empty if sampling is greedy (temperature 0)."""
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
