"""Linear latency model: computes step and transfer times of the simulated engine by linear formulas.

The time of a prefill is a constant, plus a time per token, plus a time per pair of tokens for attention. The time of a
decode step is a constant, plus a time per sequence, plus a time per token of context. The time of a transfer is a
constant plus a time per byte.
"""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND

Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
Speedup = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""Factor by which an engine is faster than its coefficients state. With the limits of both, no duration overflows."""


class EngineLatency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the coefficients of one engine on one device, in milliseconds.

    The defaults resemble a tiny Llama model (hidden 256, 4 layers, fp32) on one CPU core under vLLM 0.32 with one OMP
    thread. In this setup, a decode step took 2.4, 3.8 and 8.75 ms at batch sizes 1, 8 and 32, and the prefill of 3000
    tokens took 0.21 s.
    """

    prefill_base_ms: Milliseconds = 5.0
    """Constant time of a step that has prompt tokens."""

    prefill_ms_per_token: Milliseconds = 0.07
    """Time for each prompt token of a step."""

    prefill_ms_per_token_and_context: Milliseconds = 0.0
    """Time for each pair of a prompt token and a token before it. The default is 0, because the effect is too small to
    measure with the tiny model, even at 4,096 tokens."""

    step_base_ms: Milliseconds = 2.2
    """Constant time of a decode step."""

    step_ms_per_sequence: Milliseconds = 0.2
    """Time for each sequence of a decode step."""

    step_ms_per_context_token: Milliseconds = 0.0
    """Time for each token in the context of the sequences of a decode step."""

    transfer_base_ms: Milliseconds = 0.5
    """Constant time of a transfer of blocks."""

    transfer_ms_per_mib: Milliseconds = 0.3
    """Time for each MiB of a transfer. The default corresponds to 3.4 GB/s, as measured on a loopback socket."""

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        """Return the duration of a step in seconds.

        The arguments are sums over the step: prompt tokens to compute, pairs of such a token and a token before it,
        decoding sequences, and tokens in the contexts of these sequences.
        """
        milliseconds = 0.0
        if prefill_tokens:
            milliseconds += self.prefill_base_ms + self.prefill_ms_per_token * prefill_tokens
            milliseconds += self.prefill_ms_per_token_and_context * prefill_pairs
        if decodes:
            milliseconds += self.step_base_ms + self.step_ms_per_sequence * decodes
            milliseconds += self.step_ms_per_context_token * decode_context
        return milliseconds * MILLISECOND / SECOND

    def transfer_ms(self, num_bytes: int) -> float:
        """Return the milliseconds to move `num_bytes` bytes of blocks, or 0 if there are none."""
        assert num_bytes >= 0, num_bytes
        if not num_bytes:
            return 0.0
        return self.transfer_base_ms + self.transfer_ms_per_mib * num_bytes / (1 << 20)
