"""Ports of the router: what it needs from workers and from text processing."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import ChatMessage, TokenBytes
from fleet.core.work import Start


class Workers(Protocol):
    """All workers of the cluster.

    What they do (join, leave, advance requests, change their caches) is passed to `RouterServer.hear`, in order for each worker. An event
    that occurs during one of these calls is processed after the call.
    """

    def start(self, worker_id: WorkerId, start: Start) -> None:
        """Send an attempt to a worker; never block.

        Raises:
            WorkerUnreachable: There is no stream to that worker; nothing was sent.
        """
        ...

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Stop an attempt; ignored if the worker has gone, because its attempts are gone too."""
        ...


class WorkerUnreachable(Exception):
    def __init__(self, worker_id: WorkerId):
        super().__init__(worker_id)
        self.worker_id = worker_id


class TextDecoder(Protocol):
    """Turns one request's tokens into text, one after the other."""

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that is certain now; incomplete characters wait for the next call."""
        ...

    def flush(self) -> str:
        """Return the waiting text, with U+FFFD for incomplete characters."""
        ...


class TextCodec(Protocol):
    """Tokenizer and chat template of one model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, special: bool = True) -> TokenBytes:
        """Return the token ids of a plain prompt, with the special tokens that the model puts before it unless `special` is false."""
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The model's own description of its answers (Hugging Face's response template); None: it has none."""
        ...

    def render(self, messages: Sequence[ChatMessage], tools: str = "", template_args: str = "") -> TokenBytes:
        """Return the token ids of a conversation, up to the assistant's turn.

        Args:
            messages: At least one message.
            tools: Tools that the model may call, in the form of `ChatPrompt.tools`; empty: none.
            template_args: Further variables of the template, in the form of `ChatPrompt.template_args`; empty: none.

        Raises:
            RequestRejected: The template does not accept these messages or knows no tools, or the model has no template (INVALID_ARGUMENT,
                field ``chat.messages``, ``chat.tools`` or ``chat.template_args``).
        """
        ...

    def decoder(self, prompt: TokenBytes = b"", *, special: bool = False) -> TextDecoder:
        """Return a decoder for one answer.

        Args:
            prompt: The prompt before it, which decides for some models whether a space is text.
            special: Whether special tokens are text.
        """
        ...

    def decode(self, tokens: TokenBytes) -> str:
        """Return the text of a prompt, special tokens included."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token; a part of a character is U+FFFD."""
        ...
