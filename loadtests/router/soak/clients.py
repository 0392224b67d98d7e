"""Clients of the soak test: send requests over gRPC and HTTP, compare the answers, and count the results."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from fleet.client import AsyncClient, FleetError, Unavailable
from fleet.client.requests import Options
from fleet.core.errors import Reason
from fleet.core.requests import Sampling
from loadtests.router.soak.answers import AnswerDifference, difference
from loadtests.router.soak.requests import SoakRequest

LONGEST_SECONDS = 240.0
"""Time limit of an answer; usually an answer takes a second. The limit is high because a machine that is busy with other work can
delay everything for minutes."""

PATH = "/v1/completions"
WORTH_A_RETRY = {Reason.NO_WORKER, Reason.QUEUE_FULL, Reason.DRAINING, Reason.WORKER_LOST}

TextOf = Callable[[Sequence[int], Sequence[int]], str]
"""Function that returns the text of an answer, from the tokens of the prompt and of the answer."""


class AnswerFailed(Exception):
    """The router ended the answer with an error."""

    def __init__(self, reason: Reason | None, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class SoakTally:
    """Counts of all requests of a run and of their results."""

    requests: int = 0
    tokens: int = 0
    """Number of tokens that clients received."""

    lost: int = 0
    repeated: int = 0
    completed: int = 0
    left: int = 0
    """Number of clients that cancelled their request."""

    errors: Counter[str] = field(default_factory=Counter)
    """Requests that ended with an error that permits a retry, by reason."""

    broken: list[str] = field(default_factory=list)
    """A text for each promise that the router broke (rule 4 of the package)."""

    first_token_seconds: list[float] = field(default_factory=list)

    def note_difference(self, wish: SoakRequest, found: AnswerDifference) -> None:
        self.lost += found.lost
        self.repeated += found.repeated
        if found.lost or found.repeated:
            front = "HTTP" if wish.over_http else "gRPC"
            self.broken.append(
                f"{front}: {found.lost} lost and {found.repeated} repeated of {len(wish.expected)} tokens"
            )


class ReceivedAnswer(Struct):
    """The part of an answer that a client has received so far."""

    tokens: list[int] = []  # over gRPC they come one by one, over HTTP all with the last event
    text: str = ""
    pieces: int = 0  # number of received tokens (gRPC) or events with text (HTTP)
    ended: bool = False


class SoakClients:
    """All clients of one router."""

    def __init__(self, http: str, grpc: str, model: str, text_of: TextOf, *, resume_seconds: float = 0.0):
        """Prepare the clients. If a stream breaks, a gRPC client tries for `resume_seconds` to continue the stream; 0: it does not try."""
        self.tally = SoakTally()
        self._model = model
        self._text_of = text_of
        self._grpc = AsyncClient(grpc, resume_seconds=resume_seconds)
        self._http = HttpConnections(http)

    async def close(self) -> None:
        self._http.close()
        await self._grpc.close()

    async def ask(self, wish: SoakRequest, got: ReceivedAnswer | None = None) -> None:
        """Send one request, read its answer, and count the result. Meanwhile, `got` has what was received so far.

        A client with `leaves_after` stops after this number of tokens.
        """
        tally, got = self.tally, ReceivedAnswer() if got is None else got
        tally.requests += 1
        pieces = self._over_http(wish, got) if wish.over_http else self._over_grpc(wish, got)
        began = time.perf_counter()
        limit = asyncio.timeout(LONGEST_SECONDS)
        try:
            async with limit:
                async for _ in pieces:
                    if got.pieces == 1:
                        tally.first_token_seconds.append(time.perf_counter() - began)
                    if wish.leaves_after is not None and got.pieces >= wish.leaves_after:
                        break
        except TimeoutError:
            self._never_ended(wish, got)
        except AnswerFailed as failure:
            if limit.expired():  # when the time limit cancels a gRPC call, gRPC raises its own error
                self._never_ended(wish, got)
            else:
                self._failed(wish, got, failure)
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            tally.broken.append(f"after {got.pieces} pieces: {type(error).__name__}: {error}")
        else:
            self._compare(wish, got)
            tally.completed += got.ended
            tally.left += not got.ended
        finally:
            await pieces.aclose()
        tally.tokens += len(got.tokens) or got.pieces

    def _never_ended(self, wish: SoakRequest, got: ReceivedAnswer) -> None:
        self.tally.lost += max(1, len(wish.expected) - len(got.tokens))
        self.tally.broken.append(f"an answer did not end within {LONGEST_SECONDS:.0f} s, after {got.pieces} pieces")

    def _failed(self, wish: SoakRequest, got: ReceivedAnswer, failure: AnswerFailed) -> None:
        tally = self.tally
        self._compare(wish, got)
        if failure.reason not in WORTH_A_RETRY or got.pieces:
            tally.broken.append(f"after {got.pieces} tokens: {failure.reason}: {failure}")
        else:
            assert failure.reason is not None
            tally.errors[failure.reason.value] += 1

    def _compare(self, wish: SoakRequest, got: ReceivedAnswer) -> None:
        expected = wish.expected
        if got.tokens or not wish.over_http:
            self.tally.note_difference(wish, difference(expected, tuple(got.tokens), whole=got.ended))
        if wish.over_http:
            text = self._text_of(wish.prompt, expected)
            self.tally.note_difference(wish, difference(text, got.text, whole=got.ended))

    async def _over_grpc(self, wish: SoakRequest, got: ReceivedAnswer) -> AsyncGenerator[None, None]:
        sampling = wish.sampling
        options: Options = {
            "model": self._model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": True,
            "session": wish.session,
            **wish.options,
        }
        if sampling.seed is not None:
            options["seed"] = sampling.seed
        stream = self._grpc.generate(wish.prompt, **options)
        try:
            async with stream:
                async for delta in stream:
                    for token in delta.token_ids:
                        got.tokens.append(token)
                        got.pieces += 1
                    yield
        except FleetError as error:
            hint = "" if not isinstance(error, Unavailable) or error.retry_after_seconds else " (no hint)"
            raise AnswerFailed(error.reason, error.message + hint) from error
        got.ended = True

    async def _over_http(self, wish: SoakRequest, got: ReceivedAnswer) -> AsyncGenerator[None, None]:
        async with aclosing(self._http.stream(PATH, self._body(wish))) as events:
            async for event in events:
                if event.error is not None:
                    raise AnswerFailed(event.error.reason, event.error.message)
                for choice in event.choices:
                    got.text += choice.text
                    got.pieces += bool(choice.text)
                if event.fleet is not None:
                    got.tokens = event.fleet.token_ids
                else:
                    yield
        if not got.tokens:
            raise ValueError("the stream ended well without its last event")
        got.ended = True

    def _body(self, wish: SoakRequest) -> bytes:
        sampling: Sampling = wish.sampling
        fields: dict[str, object] = {
            "model": self._model,
            "stream": True,
            "prompt": wish.prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "ignore_eos": True,
            "fleet": {"return_token_ids": True, "session": wish.session},
        }
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        return msgspec.json.encode(fields)


class _SoakChoice(Struct):
    text: str = ""


class _SoakFleet(Struct):
    token_ids: list[int] = []


_REASONS = {reason.value: reason for reason in Reason}


class _SoakError(Struct):
    message: str
    code: str

    @property
    def reason(self) -> Reason | None:
        return _REASONS.get(self.code)


class _SoakEvent(Struct):
    choices: list[_SoakChoice] = []
    fleet: _SoakFleet | None = None
    error: _SoakError | None = None


_EVENT = msgspec.json.Decoder(_SoakEvent)
_DONE = b"[DONE]"


class HttpConnections:
    """Keep-alive connections to one server, each with one request at a time; a cancelled request closes its connection."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle = []

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[_SoakEvent, None]:
        """Yield the events of an answer; the body of a rejection is the only event.

        Raises:
            IncompleteReadError, OSError: The connection ended in the middle of the answer.
            ValueError: The stream ended without its last event.
        """
        while self._idle and self._idle[-1][0].at_eof():  # the server has closed the connection after a long idle time
            self._idle.pop()[1].close()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        reusable = False
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                content = await reader.readexactly(int(length.partition(b":")[2]))
                reusable = b"connection: close" not in head.lower()
                yield _EVENT.decode(content)
                return
            text = b""
            done = failed = False
            while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
                text += (await reader.readexactly(size + 2))[:-2]
                *events, text = text.split(b"\n\n")
                for each in events:
                    content = each.removeprefix(b"data: ")
                    done = done or content == _DONE
                    if content != _DONE:
                        event = _EVENT.decode(content)
                        failed = failed or event.error is not None
                        yield event
            await reader.readexactly(2)
            reusable = not failed
            if not done and not failed:
                raise ValueError("the stream ended without [DONE]")
        finally:
            if reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()
