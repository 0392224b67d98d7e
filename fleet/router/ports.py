"""What the router's server needs of the world."""

from collections.abc import Sequence
from typing import Protocol

from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import ChatMessage, TokenBytes
from fleet.core.work import Start


class Workers(Protocol):
    """All workers of the cluster, behind one door.

    What they do (join, leave, advance requests, change their caches) is told to `RouterServer.hear`, each worker's doings
    in their order. What is told from within these calls is heard after them.
    """

    def start(self, worker_id: WorkerId, start: Start) -> None:
        """Send work. Never blocks.

        Raises:
            WorkerUnreachable: There is no stream to that worker; nothing was sent.
        """
        ...

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Stop work; ignored when the worker is gone, since its work is gone too."""
        ...


class WorkerUnreachable(Exception):
    def __init__(self, worker_id: WorkerId):
        super().__init__(worker_id)
        self.worker_id = worker_id


class TextDecoder(Protocol):
    """Turns one request's tokens into text, a few at a time."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that is now certain; incomplete characters wait for the next call."""
        ...

    def flush(self) -> str:
        """What was waiting, with U+FFFD for incomplete characters."""
        ...


class TextCodec(Protocol):
    """Tokenizer and chat template of one model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> TokenBytes:
        """Token ids of a plain prompt, with the special tokens that the model puts before it."""
        ...

    def render(self, messages: Sequence[ChatMessage], tools: str = "") -> TokenBytes:
        """Token ids of a conversation, ready for the assistant's turn.

        Args:
            messages: Of which there is at least one.
            tools: That the model may call, as `fleet.core.requests.ChatPrompt` has them; empty: none.

        Raises:
            Refused: The template does not accept these messages or knows no tools, or the model has none (INVALID_ARGUMENT,
                field ``chat.messages`` or ``chat.tools``).
        """
        ...

    def decoder(self, prompt: TokenBytes = b"") -> TextDecoder:
        """Of one answer; `prompt` is what comes before it, which decides for some models whether a space is text."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token alone; a part of a character is U+FFFD."""
        ...
