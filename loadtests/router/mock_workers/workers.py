"""Mock workers: answer requests of the OpenAI API with prepared bytes, with as little CPU time as Python allows.

    python -m loadtests.router.mock_workers.workers JSON     prints the ports, one JSON line, when it is ready

Rules:

1. All workers of a run are one process with one event loop. Each worker has its own port, counters and prefix
   cache, and computes the prompts of its requests one after the other.
2. Workers read only the parts of a request that the scenario needs; without a prefix cache, bodies are only counted.
3. The head of an answer and its first token are sent in one write, and so is a whole answer of one token. The further tokens of all
   answers of a worker are sent together at the worker's pace, like the decode steps of an engine.
4. The workers count cache hits and requests (`GET /counters`), so that figures do not depend on what routers report.
5. Other requests by which routers check workers (health, models, versions, loads) have prepared answers; unknown paths get a 404.
"""

import asyncio
import gc
import json
import os
import re
import sys
import time
from functools import partial
from itertools import islice
from typing import Any, cast

import msgspec
import uvloop
import xxhash
from msgspec import Struct

from fleet.local.process_group import die_with_parent
from loadtests.router.load.prompts import CONTEXT_TOKENS, MODEL

BLOCK_BYTES = 256  # bytes of text in a block, which are about 64 tokens
END_OF_HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
EXPECTS = re.compile(rb"\r\nexpect:[ \t]*100-continue", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"
NEAR = 256  # short fields are searched only in this number of bytes at each end of a body
STREAM = re.compile(rb'"stream":\s*true')


class MockWorkerSettings(Struct, frozen=True, kw_only=True):
    workers: int
    tokens: int = 1
    """Number of tokens of each answer."""

    gap_seconds: float = 0.0
    cache_blocks: int = 0
    prefill_seconds_a_block: float = 0.0


class MockWorkerCounters(Struct):
    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    hits: int = 0
    probes: int = 0
    """Number of requests other than completions, such as health checks."""


class MockPrompt(Struct):
    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] = []

    def text(self) -> bytes:
        if self.messages:
            return msgspec.json.encode(self.messages)
        return self.prompt.encode() if isinstance(self.prompt, str) else msgspec.json.encode(self.prompt)


PROMPT = msgspec.json.Decoder(MockPrompt)


class PrefixCache:
    """Prefix cache with blocks of text instead of tokens. The name of a block is the hash of all text up to its end.

    The least recently used block is evicted first; among the blocks of one prompt, the last one.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity  # maximum number of blocks
        self._blocks: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def admit(self, prompt: bytes) -> tuple[int, int]:
        """Store a prompt.

        Returns:
            The number of leading blocks that were cached, and the number of full blocks.
        """
        chain = []
        parent = 0
        for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
            parent = xxhash.xxh3_64_intdigest(prompt[end - BLOCK_BYTES : end], parent)
            chain.append(parent)
        known = next((number for number, block in enumerate(chain) if block not in self._blocks), len(chain))
        for block in reversed(chain):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for block in list(islice(self._blocks, max(0, len(self._blocks) - self._capacity))):
            del self._blocks[block]
        return known, len(chain)


class CannedAnswers:
    """All prepared answers as bytes."""

    def __init__(self) -> None:
        self.head = _head("text/event-stream", b"transfer-encoding: chunked")
        self.token = {chat: _event(_token(chat, finished=False)) for chat in (False, True)}
        self.last = {chat: _event(_token(chat, finished=True)) for chat in (False, True)}
        self.done = _chunk(b"data: [DONE]\n\n") + LAST_CHUNK
        self.whole = {chat: _json(_whole(chat)) for chat in (False, True)}
        models = {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "nobody", "max_model_len": CONTEXT_TOKENS}],
        }
        model = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True}
        self.canned = {
            b"/health": _json({}),
            b"/health_generate": _json({}),
            b"/ping": _json({}),
            b"/v1/models": _json(models),
            b"/version": _json({"version": "0.32.0"}),
            b"/get_model_info": _json(model),
            b"/model_info": _json(model),
            b"/get_server_info": _json(model | {"dp_size": 1, "tp_size": 1, "version": "0.5.0"}),
            b"/server_info": _json(model | {"dp_size": 1, "tp_size": 1, "version": "0.5.0"}),
            b"/get_load": _json([{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]),
            b"/metrics": _whole_answer(b"200 OK", b"text/plain", b""),
        }
        self.unknown = _whole_answer(b"404 Not Found", b"application/json", b'{"error":"there is no such path"}')


class MockWorker:
    def __init__(self, settings: MockWorkerSettings, answers: CannedAnswers, loop: asyncio.AbstractEventLoop):
        self.settings = settings
        self.answers = answers
        self.counters = MockWorkerCounters()
        self._loop = loop
        self._cache = PrefixCache(settings.cache_blocks)
        self._free_at = 0.0
        # For each connection, the number of tokens that are still to be sent.
        self._streams: dict[MockWorkerConnection, int] = {}
        self._beating = False

    @property
    def reads_prompts(self) -> bool:
        return self.settings.cache_blocks > 0

    def reset(self) -> None:
        self.counters = MockWorkerCounters()
        self._cache = PrefixCache(self.settings.cache_blocks)

    def complete(self, connection: "MockWorkerConnection", body: bytes, *, chat: bool) -> None:
        """Count a request, and begin its answer after the time that the prefills before it and its own uncached blocks take."""
        counters = self.counters
        counters.requests += 1
        ends = body[:NEAR] + body[-NEAR:]
        streamed = STREAM.search(ends) is not None
        if not self.reads_prompts:
            self._begin(connection, chat=chat, streamed=streamed)
            return
        known, blocks = self._cache.admit(PROMPT.decode(body).text())
        counters.blocks += blocks
        counters.hits += known
        now = self._loop.time()
        self._free_at = max(now, self._free_at) + (blocks - known) * self.settings.prefill_seconds_a_block
        self._loop.call_at(self._free_at, lambda: self._begin(connection, chat=chat, streamed=streamed))

    def forget(self, connection: "MockWorkerConnection") -> None:
        self._streams.pop(connection, None)

    def _begin(self, connection: "MockWorkerConnection", *, chat: bool, streamed: bool) -> None:
        answers = self.answers
        tokens = self.settings.tokens
        if not streamed:
            self.counters.tokens += tokens
            connection.send(answers.whole[chat])
        elif tokens == 1:
            self.counters.tokens += 1
            connection.send(answers.head + answers.last[chat] + answers.done)
        else:
            self.counters.tokens += 1
            connection.chat = chat
            connection.send(answers.head + answers.token[chat])
            self._streams[connection] = tokens - 1
            if not self._beating:
                self._beating = True
                at = self._loop.time() + self.settings.gap_seconds
                self._loop.call_at(at, self._beat, at)

    def _beat(self, at: float) -> None:
        """Send the next token of all running answers, and call this method again after `gap_seconds` while any is left."""
        answers = self.answers
        self.counters.tokens += len(self._streams)
        for connection, left in list(self._streams.items()):
            if left > 1:
                self._streams[connection] = left - 1
                connection.send(answers.token[connection.chat])
            else:
                del self._streams[connection]
                connection.send(answers.last[connection.chat] + answers.done)
        self._beating = bool(self._streams)
        if self._beating:
            self._loop.call_at(at + self.settings.gap_seconds, self._beat, at + self.settings.gap_seconds)


class MockWorkerConnection(asyncio.Protocol):
    """A connection of a router, with one request at a time."""

    chat = False

    def __init__(self, worker: MockWorker):
        self._worker = worker
        self._parts: list[bytes] = []
        self._left: int | None = None  # missing bytes of the body; None: the head of the request is not complete
        self._chunked = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._worker.forget(self)

    def send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._begun(b"".join((*self._parts, data)) if self._parts else data)
        elif self._chunked:
            self._parts.append(data)
            if b"".join(self._parts[-2:]).endswith(LAST_CHUNK):
                self._complete()
        else:
            self._left -= len(data)
            if self._worker.reads_prompts or self._left <= 0:
                self._parts.append(data)
            if self._left <= 0:
                self._complete()

    def _begun(self, data: bytes) -> None:
        end = data.find(END_OF_HEAD)
        self._parts = [data]
        if end < 0:
            return
        if EXPECTS.search(data, 0, end):
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = LENGTH.search(data, 0, end)
        self._chunked = length is None and CHUNKED.search(data, 0, end) is not None
        self._left = (int(length[1]) if length else 0) - (len(data) - end - len(END_OF_HEAD))
        if data.endswith(LAST_CHUNK) if self._chunked else self._left <= 0:
            self._complete()

    def _complete(self) -> None:
        parts, self._parts, self._left = self._parts, [], None
        message = parts[0] if len(parts) == 1 else b"".join(parts)
        end = message.find(END_OF_HEAD)
        method, target, _ = message[: message.find(b"\r\n")].split(b" ", 2)
        path = target.partition(b"?")[0]
        if method == b"POST" and path in (b"/v1/completions", b"/v1/chat/completions"):
            body = message[end + len(END_OF_HEAD) :]
            self._worker.complete(self, _joined(body) if self._chunked else body, chat=path != b"/v1/completions")
        elif path == b"/counters":
            counters = msgspec.to_builtins(self._worker.counters)
            self.send(_json(counters | {"process_cpu_seconds": time.process_time()}))
        elif path == b"/reset":
            self._worker.reset()
            self.send(_json({}))
        else:
            self._worker.counters.probes += 1
            self.send(self._worker.answers.canned.get(path, self._worker.answers.unknown))


def _joined(body: bytes) -> bytes:
    """Return the content of a body in chunked transfer encoding."""
    content = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if not length:
            return content
        content += body[:length]
        body = body[length + 2 :]


def _token(chat: bool, *, finished: bool) -> dict[str, Any]:
    """Return the content of an event with one token, as vLLM writes it."""
    reason = {"finish_reason": "length" if finished else None}
    text: dict[str, Any] = {"delta": {"content": " a"}} if chat else {"text": " a", "stop_reason": None}
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1_750_000_000,
        "model": MODEL,
        "choices": [{"index": 0, **text, "logprobs": None, **reason}],
    }


def _whole(chat: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"message": {"role": "assistant", "content": " a"}} if chat else {"text": " a"}
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1_750_000_000,
        "model": MODEL,
        "choices": [{"index": 0, **text, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _head(content_type: str, *more: bytes) -> bytes:
    return b"\r\n".join((b"HTTP/1.1 200 OK", f"content-type: {content_type}".encode(), *more, b"", b""))


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def _event(value: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


def _json(value: Any) -> bytes:
    return _whole_answer(b"200 OK", b"application/json", json.dumps(value).encode())


def _whole_answer(status: bytes, content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)


async def _serve(settings: MockWorkerSettings) -> None:
    loop = asyncio.get_running_loop()
    answers = CannedAnswers()
    ports = []
    servers = []
    for _ in range(settings.workers):
        worker = MockWorker(settings, answers, loop)
        server = await loop.create_server(partial(MockWorkerConnection, worker), "127.0.0.1", 0, backlog=1024)
        servers.append(server)
        ports.append(server.sockets[0].getsockname()[1])
    gc.freeze()
    print(json.dumps({"ports": ports}), flush=True)
    await loop.create_future()  # serve until the process is killed


def main() -> None:
    die_with_parent(os.getppid())
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=MockWorkerSettings)))


if __name__ == "__main__":
    main()
