"""Fuzz test of the parsers that read clients' bytes: ``python -m tests.support.frontend.fuzz_parsers SECONDS FOLDER``.

It uses atheris (libFuzzer). The first byte of an input chooses the parser. A rejection is a valid result. Any other
exception ends the process, and the input is written into the folder. The HTTP parser has to give the same answers
for the same bytes, in whichever pieces they arrive.
"""

import faulthandler
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fleet"]):
    from google.protobuf.message import DecodeError

    from fleet.core.clock import Nanos
    from fleet.core.errors import RequestRejected
    from fleet.core.ids import ModelName, RequestId
    from fleet.core.requests import ModelCard
    from fleet.core.system_clock import SystemClock
    from fleet.core.validation import validate
    from fleet.frontend.openai.requests import read_chat, read_completion
    from fleet.net.connection_limits import ConnectionTable
    from fleet.net.http.errors import http_error_body
    from fleet.net.http.exchange import HeadCache, HeldBodyBytes
    from fleet.net.http.server import HttpConnection
    from fleet.net.limit_log import ClientLog
    from fleet.net.settings import HttpSettings
    from fleet.v1 import inference_pb2, kserve_pb2
    from fleet.wire.inference import decode_request
    from fleet.wire.kserve import decode_infer

# Headers of an answer that differ between two answers to the same request: the id is random if the client sent none.
VARYING = re.compile(rb"(?:(?:x-)?request-id|date): [^\r]*\r\n")
CARD = ModelCard(name=ModelName("m"), max_model_len=4096, block_tokens=32, workers=1)
ID = RequestId("r")
NOW = Nanos(1)

REQUEST = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{"prompt":"x"}'
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
BODY = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ],
    "prompt": [1, 2],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "structured_outputs": {"regex": "a+"},
    "stop": ["x"],
    "fleet": {"placement": "aggregated", "labels": ["a"], "timeout_ms": 1},
    "logprobs": True,
    "n": 2,
    "best_of": 2,
    "echo": True,
    "logit_bias": {"1": 1.5},
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "thinking_token_budget": 9,
    "truncate_prompt_tokens": 3,
    "stream_options": {"continuous_usage_stats": True},
    "seed": 1,
}


class Transport:
    """Transport that records what is written."""

    def __init__(self):
        self.written = b""
        self.closing = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closing

    def can_write_eof(self):
        return True

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, high): ...

    def pause_reading(self): ...

    def resume_reading(self): ...

    def write_eof(self): ...

    def close(self):
        self.closing = True

    abort = close


class Served:
    def cancel(self): ...


def echo(exchange):
    exchange.respond(200, exchange.request.body, headers=(("path", str(len(exchange.request.path))),))
    exchange.over()
    return Served()


def answers(*pieces):
    transport = Transport()
    table: ConnectionTable = ConnectionTable(1, 1.0)
    connection = HttpConnection(
        HttpSettings(),
        SystemClock(),
        echo,
        http_error_body,
        {},
        table,
        HeadCache(),
        HeldBodyBytes(),
        ClientLog(HttpSettings()),
    )
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.closing:
            connection.data_received(piece)
    return VARYING.sub(b"", transport.written)


def http(data):
    cut = data[0] % (len(data) + 1) if data else 0
    whole = answers(data)
    assert whole == b"" or whole.startswith(b"HTTP/1.1 "), whole
    assert answers(data[:cut], data[cut:]) == whole, cut
    assert answers(*(data[at : at + 1] for at in range(len(data)))) == whole, "byte by byte"


def chat(data):
    validate(read_chat(data, ID, NOW).request, CARD, None, vocab_size=500)


def completion(data):
    validate(read_completion(data, ID, NOW).request, CARD, None, vocab_size=500)


def grpc(data):
    message = inference_pb2.GenerateRequest.FromString(data)
    validate(decode_request(message, ID, None), CARD, None, vocab_size=500)


def kserve(data):
    message = kserve_pb2.ModelInferRequest.FromString(data)
    validate(decode_infer(message, ID, NOW, None).request, CARD, None, vocab_size=500)


PARSERS = (http, chat, completion, grpc, kserve)


def parse(data: bytes) -> None:
    if data:
        with suppress(RequestRejected, DecodeError):
            PARSERS[data[0] % len(PARSERS)](data[1:])


def seeds():
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=kserve_pb2.InferTensorContents(bytes_contents=[b"x"])
    )
    infer = kserve_pb2.ModelInferRequest(model_name="m", inputs=[tensor])
    infer.parameters["max_tokens"].int64_param = 4
    form = inference_pb2.Form(choice=inference_pb2.Choice(strings=["a"]))
    asked = inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.Sampling(seed=1, form=form))
    body = json.dumps(BODY).encode()
    contents = (REQUEST * 2, body, body, asked.SerializeToString(), infer.SerializeToString())
    yield from (bytes([number]) + content for number, content in enumerate(contents))
    yield bytes([0]) + CHUNKED + REQUEST
    yield bytes([0]) + b"POST /v1/completions\r\n\tx"


def in_a_child() -> None:
    """Fork, and return only in the child process; the parent waits for the child and exits with the child's status.

    libFuzzer compares its memory limit with the peak memory of the process. On Linux, a started program begins with the
    peak of the process that started it. So this program would exceed the limit if the test run that starts it has used
    more memory before. A forked process begins with a peak of its own.
    """
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def main() -> None:
    in_a_child()
    seconds, folder = int(sys.argv[1]), Path(sys.argv[2])
    # libFuzzer reports an input that takes too long; this ends the process if it hangs outside of an input.
    faulthandler.dump_traceback_later(seconds + 300, exit=True)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-malloc_limit_mb=512",
    ]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(corpus)], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
