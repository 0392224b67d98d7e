"""Ports of the router: what the router needs from workers and from text processing."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import ChatMessage, TokenBytes
from fleet.core.work import Start


class Workers(Protocol):
    """Port: all workers of the cluster, to which the router sends attempts.

    The implementation passes all events of workers (they join, leave, advance requests, change their caches) to `RouterServer.hear`, in
    order for each worker. An event that occurs during a call of one of these methods is processed after the call.
    """

    def start(self, worker_id: WorkerId, start: Start) -> None:
        """Send an attempt to a worker. The call never blocks.

        Raises:
            WorkerUnreachable: There is no stream to that worker; nothing was sent.
        """
        ...

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Stop an attempt on a worker. Do nothing if the worker has gone, because its attempts have ended with it."""
        ...


class WorkerUnreachable(Exception):
    def __init__(self, worker_id: WorkerId):
        super().__init__(worker_id)
        self.worker_id = worker_id


class TextDecoder(Protocol):
    """Port: turns the tokens of one answer into text, one token after the other."""

    def add(self, token_id: int) -> str:
        """Add a token. Return the text that can no longer change; an incomplete character is held back until later tokens complete it."""
        ...

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for incomplete characters."""
        ...


class TextCodec(Protocol):
    """Port: the tokenizer and the chat template of one model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The model's own values of sampling parameters that a client leaves out, by the names of fields of `Sampling`; empty: none."""
        ...

    @property
    def class_names(self) -> Mapping[int, str]:
        """The names of a classifying model's classes, by the number of the class; empty if the model has no classes, or they have no names."""
        ...

    @property
    def created(self) -> int:
        """The Unix time in seconds at which the model's files were last changed, equal for all processes that read the same files."""
        ...

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        """The token ids that may stand for an image in a prompt; empty for models without images."""
        ...

    def encode(self, text: str, special: bool = True) -> TokenBytes:
        """Return the token ids of a text. If `special` is true, the special tokens that the model puts before a prompt come first."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[TokenBytes, int]:
        """Return the token ids of a pair of texts as one prompt, and how many of these tokens belong to the first text.

        If the tokenizer cannot say where the first text ends, the number of all tokens is returned.
        """
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The model's own description of its answers (Hugging Face's response template); None: it has none."""
        ...

    def render(self, messages: Sequence[ChatMessage], tools: str = "", template_args: str = "") -> TokenBytes:
        """Return the token ids of a conversation up to the beginning of the assistant's answer.

        Args:
            messages: At least one message.
            tools: Tools that the model may call, in the form of `ChatPrompt.tools`; empty: none.
            template_args: Additional variables for the template, in the form of `ChatPrompt.template_args`; empty: none.

        Raises:
            RequestRejected: The template does not accept these messages or knows no tools, or the model has no template (INVALID_ARGUMENT,
                field ``chat.messages``, ``chat.tools`` or ``chat.template_args``).
        """
        ...

    def decoder(self, prompt: TokenBytes = b"", *, special: bool = False) -> TextDecoder:
        """Return a decoder for one answer.

        Args:
            prompt: The token ids of the prompt. With some models they decide whether the answer's first space is text.
            special: True if special tokens are to appear in the text.
        """
        ...

    def decode(self, tokens: TokenBytes) -> str:
        """Return the text of the tokens of a prompt. Special tokens appear in the text."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token. Incomplete characters become U+FFFD."""
        ...
