"""Answer oracle: computes the simulated model's correct answers for tests, without an engine, a cache or a transfer."""

from fleet.core.requests import TOKEN_BYTES, Sampling, TokenBytes
from workers.engines.simulated.model import SimulatedModel


class AnswerOracle:
    """Computes the answers that an engine with this model has to give; tests compare them with the engine's answers."""

    def __init__(self, model: SimulatedModel, block_tokens: int):
        self._model = model
        self._block_bytes = block_tokens * TOKEN_BYTES

    def answer(self, prompt: TokenBytes, sampling: Sampling) -> tuple[int, ...]:
        """Return all `max_tokens` tokens of the answer; the sampling parameters must ignore end-of-sequence tokens."""
        assert sampling.ignore_eos
        model, size = self._model, self._block_bytes
        digest, tail = model.beginning, bytearray()
        found: list[int] = []
        text, answer = bytearray(prompt), b""
        while True:
            while len(text) >= size:
                digest = model.read(digest, model.compute(digest, bytes(text[:size])))
                del text[:size]
            tail = text
            if len(found) == sampling.max_tokens:
                return tuple(found)
            shifts = model.penalty_shifts(sampling, prompt, answer)
            token = model.draw(digest, tail, sampling, may_end=False, shifts=shifts).token
            found.append(token)
            text += token.to_bytes(TOKEN_BYTES, "little")
            answer += token.to_bytes(TOKEN_BYTES, "little")
