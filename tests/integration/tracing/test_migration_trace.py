"""Test of the trace of one disaggregated request that migrates, as a collector got it, against a golden file.

The golden file leaves out times and what follows from the moment at which the worker dies. To write it anew after a change of what is
traced, delete it, run the test twice, and read the difference.
"""

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from fleet.client import Client
from tests.support.documents import ROOT
from tests.support.servers.otlp_collector import CollectedSpan, an_otlp_collector
from tests.support.traced_cluster import BLOCK_TOKENS, TracedCluster, a_traced_cluster

pytestmark = pytest.mark.integration

GOLDEN = Path(__file__).with_name("migration.golden")
TRACING_PAGE = ROOT / "docs" / "tracing.md"

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {
    "traceparent": f"00-{TRACE_ID}-{CALLER}-01",
    "tracestate": "vendor=value",
    "baggage": "shop.tier=gold,secret=x",
    "x-request-id": "golden-1",
}
PROMPT_BLOCKS, ANSWER_TOKENS = 5, 400

VARIES = re.compile(
    r"cost|time_to_first|answer_tokens|prefill_tokens|uncached|prompt_tokens|cached|blocks|bytes|prompt_blocks"
)
"""Attributes whose values depend on the moment at which the worker dies, if they belong to an attempt after it; costs always do."""


async def migrate(cluster: TracedCluster) -> httpx.Response:
    """Request a stream, kill the worker that decodes it after its first tokens, and read the stream to its end."""
    body = {
        "model": "tiny",
        "prompt": [7 + each % 50 for each in range(PROMPT_BLOCKS * BLOCK_TOKENS + 1)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events = 0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"http://{cluster.http}/v1/completions", json=body, headers=HEADERS) as answer,
    ):
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
            if events == 3 and line:
                await asyncio.to_thread(kill_decode_worker, cluster)
                events += 1
        assert line in {"", "data: [DONE]"}
    assert events >= ANSWER_TOKENS / 2, events
    return answer


def kill_decode_worker(cluster: TracedCluster) -> None:
    with Client(cluster.grpc) as control:
        (placed,) = control.explain(HEADERS["x-request-id"])
    worker = cluster.workers.pop(placed.decode)
    worker.kill()
    worker.wait(60)


def render(spans: list[CollectedSpan]) -> str:
    """Return the spans of a trace as a tree with their attributes, without what differs from run to run."""
    (root,) = [span for span in spans if span.parent_id == CALLER]
    attempts = sorted((span for span in spans if span.name.startswith("attempt ")), key=lambda span: span.began)
    names = {span.attributes["fleet.worker.id"]: "" for span in attempts}
    for place, name in enumerate(name for name in names if name.startswith("d")):
        names[name] = f"decode worker {place + 1}"
    names |= {name: "prefill worker" for name in names if name.startswith("p")}
    died = next(span for span in attempts if span.error is not None).ended
    ids = {span.span_id: span for span in spans}
    lines: list[str] = []

    def value(span: CollectedSpan, key: str, found: object) -> str:
        if "cost" in key or (VARIES.search(key) and (span.began >= died or span is root)) or "time_to_first" in key:
            return "…"
        if isinstance(found, list):
            return "[" + ", ".join(value(span, "", each) for each in found) + "]"
        return names.get(str(found), str(found))

    def add(span: CollectedSpan, depth: int) -> None:
        indent = "    " * depth
        error = "" if span.error is None else f"  error: {names_in(span.error)}"
        lines.append(f"{indent}{span.name}  [{span.service}, {span.kind.lower()}]{error}")
        for key, found in sorted(span.attributes.items()):
            lines.append(f"{indent}  {key} = {value(span, key, found)}")
        for _, span_id, attributes in span.links:
            lines.append(f"{indent}  link: {attributes['fleet.link']} -> {ids[span_id].name}")
        for name, attributes in span.events:
            lines.append(f"{indent}  event: {name} {sorted(attributes)}".rstrip(" []"))
        for child in sorted((each for each in spans if each.parent_id == span.span_id), key=place_in_time):
            add(child, depth + 1)

    def names_in(text: str) -> str:
        for name, readable in names.items():
            text = text.replace(name, readable)
        return text

    add(root, 0)
    assert len([line for line in lines if re.match(r" *\S.*  \[", line)]) == len(spans), "a span has no parent"
    return "\n".join(lines) + "\n"


def place_in_time(span: CollectedSpan) -> tuple[int, int, int]:
    """Return a key for the children of one span: those of a store node come last, because clocks of processes differ by microseconds."""
    if span.service == "fleet-kvstore":
        return 1, ("store match", "store reserve", "store publish").index(span.name), span.began
    return 0, span.began, span.ended


def drawing(rendered: str) -> str:
    """Return the names of the spans and their links alone, as docs/tracing.md shows them."""
    kept = [line for line in rendered.splitlines() if re.search(r"  \[|  link: ", line)]
    return "\n".join(re.sub(r"(?<=\S)  \[(.*?), .*?\]", r"  (\1)", line) for line in kept) + "\n"


async def test_migrated_request_gives_the_golden_trace(tmp_path, model_dir):
    with an_otlp_collector(tmp_path) as collector:
        tracing = {"endpoint": collector.grpc, "sample_ratio": 0.0, "baggage": ["shop.tier"]}
        workers = {"p1": "prefill", "d1": "decode", "d2": "decode"}
        with a_traced_cluster(tmp_path, model_dir, tracing, workers) as cluster:
            answer = await migrate(cluster)
            spans = collector.wait_for(
                TRACE_ID, "text_completion tiny", "worker prefill", "worker aggregated", "decode"
            )

    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "golden-1"
    assert {span.state for span in spans if span.service != "fleet-kvstore"} == {"vendor=value"}
    rendered = render(spans)
    if not GOLDEN.exists():
        GOLDEN.write_text(rendered)
        pytest.fail(f"{GOLDEN.name} was written; read it and run again")
    assert rendered == GOLDEN.read_text()
    assert all(span.ended >= span.began for span in spans)


def test_tracing_page_draws_the_golden_trace():
    assert drawing(GOLDEN.read_text()) in TRACING_PAGE.read_text()
