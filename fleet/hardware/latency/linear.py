"""Linear latency model: step and transfer times of the simulated engine that workers host, as straight lines.

A prefill costs a constant and a time per token, to which attention adds a time per token of context. A decode step costs a constant,
a time per sequence and a time per token of context. A transfer costs a constant and a time per byte.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

Milliseconds = Annotated[float, Meta(ge=0)]


class EngineLatency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of one engine on one device, in milliseconds.

    The defaults resemble a tiny Llama model (hidden 256, 4 layers, fp32) on one CPU core under vLLM 0.32 with one OMP thread. It
    was measured with decode steps of 2.4, 3.8 and 8.75 ms at batch sizes 1, 8 and 32, and a 3000-token prompt in 0.21 s.
    """

    prefill_base_ms: Milliseconds = 5.0
    prefill_ms_per_token: Milliseconds = 0.07
    prefill_ms_per_token_and_context: Milliseconds = 0.0  # too small to measure at 4096 tokens on this model
    step_base_ms: Milliseconds = 2.2
    step_ms_per_sequence: Milliseconds = 0.2
    step_ms_per_context_token: Milliseconds = 0.0
    transfer_base_ms: Milliseconds = 0.5
    transfer_ms_per_mib: Milliseconds = 0.3  # 3.4 GB/s, as measured on a loopback socket of the same machine

    def prefill_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Return the time to compute `new_tokens` after `context_tokens` whose KV exists; 0 if there is nothing to compute."""
        assert new_tokens >= 0, new_tokens
        assert context_tokens >= 0, context_tokens
        if not new_tokens:
            return 0.0
        attended = context_tokens + new_tokens / 2  # mean context of the new tokens
        per_token = self.prefill_ms_per_token + self.prefill_ms_per_token_and_context * attended
        return self.prefill_base_ms + per_token * new_tokens

    def decode_ms(self, sequences: int, context_tokens: int = 0) -> float:
        """Return the time of a decode step of `sequences` whose contexts add up to `context_tokens`; 0 for an empty batch."""
        assert sequences >= 0, sequences
        assert context_tokens >= 0, context_tokens
        if not sequences:
            return 0.0
        return (
            self.step_base_ms + self.step_ms_per_sequence * sequences + self.step_ms_per_context_token * context_tokens
        )

    def step_ms(self, prefills: Iterable[tuple[int, int]], sequences: int, context_tokens: int = 0) -> float:
        """Return the time of a mixed step: prompt chunks as (new tokens, context tokens), and a decode batch."""
        chunks = [self.prefill_ms(new, context) for new, context in prefills]
        shared_base = self.prefill_base_ms * max(0, len(chunks) - 1)  # one launch for all chunks
        return sum(chunks) - shared_base + self.decode_ms(sequences, context_tokens)

    def transfer_ms(self, num_bytes: int) -> float:
        """Return the time to move `num_bytes` of blocks; 0 if nothing moves."""
        assert num_bytes >= 0, num_bytes
        if not num_bytes:
            return 0.0
        return self.transfer_base_ms + self.transfer_ms_per_mib * num_bytes / (1 << 20)
