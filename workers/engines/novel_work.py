"""Novel work: tracks requests of a kind that an engine has not run before.

A step for such a request may compile a kernel or load a LoRA adapter, and then takes long.
"""

from fleet.core.ids import RequestId
from fleet.core.requests import Sampling

Kind = tuple[bool, ...]


class NovelWork:
    """Remembers the requests that are of a new kind or need a LoRA adapter loaded, each until its first tokens or its end.

    A kind is new until the engine has produced tokens for a request of this kind.
    """

    def __init__(self) -> None:
        self._done: set[Kind] = set()
        self._waiting: dict[RequestId, Kind] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begun(self, request_id: RequestId, sampling: Sampling, *, loads: bool) -> None:
        """Record that a request was given to the engine.

        `loads` is True if the engine has to load a LoRA adapter for the request first.
        """
        kind = _kind_of(sampling)
        if loads or kind not in self._done:
            self._waiting[request_id] = kind

    def brought(self, request_id: RequestId) -> None:
        """Record that the engine has produced tokens of a request, so that the request's kind is no longer new."""
        if (kind := self._waiting.pop(request_id, None)) is not None:
            self._done.add(kind)

    def ended(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)


def _kind_of(sampling: Sampling) -> Kind:
    """Return the kind of a request: its properties that decide which kernels and libraries the engine uses."""
    return (
        sampling.temperature > 0,
        sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0,
        sampling.seed is not None,
        sampling.logprobs is not None,
        bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1,
        sampling.min_tokens > 0,
        sampling.form is not None,
    )
