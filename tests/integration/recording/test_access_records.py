"""Tests of access records: what they say of requests that ended, were refused or cancelled, with and without content."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import httpx
import pytest

from fleet.core.system_clock import SystemClock
from fleet.recording.access_records import SCHEMA, AccessRecordFile
from fleet.recording.rotated_file import RotatedFile
from fleet.recording.traces import read_trace
from fleet.router.tenants import TenantSettings
from operators.chart.metric_catalogue import ROUTER
from tests.support.frontend.frontends import open_frontends
from tests.support.metric_pages import differences
from tests.support.waiting import until

pytestmark = pytest.mark.integration

CHAT = {"messages": [{"role": "user", "content": "a private question"}], "max_tokens": 8, "ignore_eos": True}
COMPLETION = {"prompt": "a private prompt", "max_tokens": 3, "ignore_eos": True}


@asynccontextmanager
async def recording_frontends(model_dir, path, *, content=False, **options):
    file = RotatedFile(path, most_bytes=1 << 30, kept=1, field="records", clock=SystemClock())
    records = AccessRecordFile(file, content=content)
    with file:
        async with open_frontends(model_dir, records=records, **options) as frontends:
            frontends.registry.register(records)
            yield frontends


async def post(frontends, path, body, **headers):
    async with httpx.AsyncClient(base_url=frontends.url, timeout=60) as client:
        return await client.post(path, json=body, headers=headers)


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_record_of_a_served_request_has_tokens_and_times(model_dir, tmp_path):
    async with recording_frontends(model_dir, tmp_path / "a") as frontends:
        frontends.will_answer("two words and more")
        frontends.router.cached_blocks = 1
        frontends.router.queued_for = 0.25
        answer = await post(
            frontends,
            "/v1/chat/completions",
            {**CHAT, "stream": True, "fleet": {"session": "s-1"}},
            **{"x-request-id": "mine"},
        )
        assert answer.status_code == 200
    (record,) = records_of(tmp_path / "a")
    assert record["schema"] == SCHEMA
    assert (record["request_id"], record["session_id"], record["model"]) == ("mine", "s-1", "tiny")
    assert (record["operation"], record["stream"], record["external"]) == ("chat", True, False)
    assert (record["outcome"], record["placement"]) == ("length", "aggregated")
    (phase,) = record["kv"]
    assert (phase["phase"], phase["worker"]) == ("aggregated", "w1")
    assert phase["blocks"]["engine"] == 1
    assert (record["output_tokens"], record["max_tokens"]) == (8, 8)
    assert record["prompt_tokens"] > 0
    assert record["queue_seconds"] == 0.25
    assert 0 < record["ttft_seconds"] <= record["duration_seconds"]
    assert record["tpot_seconds"] <= record["itl_max_seconds"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", record["time"])
    assert "private" not in (tmp_path / "a").read_text()
    assert record.keys().isdisjoint({"prompt", "answer"})


async def test_refused_and_cancelled_requests_have_records(model_dir, tmp_path):
    keyed = {"acme": TenantSettings(api_key_sha256="0" * 64)}
    async with recording_frontends(model_dir, tmp_path / "a") as frontends:
        assert (await post(frontends, "/v1/completions", {**COMPLETION, "model": "x" * 5000})).status_code == 404
        frontends.will_answer("word " * 8)
        frontends.router.hold_after = 2
        async with (
            httpx.AsyncClient(base_url=frontends.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True, "max_tokens": 8}) as answer,
        ):
            await anext(answer.aiter_lines())
        await until(lambda: len(records_of(tmp_path / "a")) == 2)
    async with recording_frontends(model_dir, tmp_path / "a", tenants=keyed) as frontends:
        assert (await post(frontends, "/v1/completions", COMPLETION)).status_code == 401
    refused, cancelled, unknown = records_of(tmp_path / "a")
    assert (refused["outcome"], refused["model"], refused["prompt_tokens"]) == ("model_not_found", "x" * 128, None)
    assert refused["ttft_seconds"] is None
    assert (cancelled["outcome"], cancelled["output_tokens"]) == ("cancelled", 2)
    assert (unknown["outcome"], unknown["tenant"]) == ("unauthenticated", "")


@pytest.mark.parametrize("stream", [True, False])
async def test_content_is_recorded_only_if_asked_for(model_dir, tmp_path, stream):
    async with recording_frontends(model_dir, tmp_path / "a", content=True) as frontends:
        frontends.will_answer("an answer of words")
        answer = await post(frontends, "/v1/completions", {**COMPLETION, "max_tokens": 40, "stream": stream})
        assert answer.status_code == 200
        frontends.will_answer("an answer of words")
        await post(frontends, "/v1/chat/completions", {**CHAT, "max_tokens": 40, "stream": stream})
    completion, chat = records_of(tmp_path / "a")
    assert (completion["prompt"], completion["answer"]) == ("a private prompt", "an answer of words")
    assert chat["prompt"][0] | {"role": "user", "content": "a private question"} == chat["prompt"][0]
    assert chat["answer"] == "an answer of words"


async def test_records_are_a_trace_for_simulations(model_dir, tmp_path):
    async with recording_frontends(model_dir, tmp_path / "a") as frontends:
        for session in ("s-1", "s-2", "s-1"):
            frontends.will_answer("some words of an answer")
            body = {**COMPLETION, "fleet": {"session": session}}
            assert (await post(frontends, "/v1/completions", body)).status_code == 200
        await post(frontends, "/v1/completions", {**COMPLETION, "model": "nobody's"})
    trace = read_trace(tmp_path / "a")
    assert trace.format == "access"
    assert [each.session for each in trace.requests] == [1, 2, 1]
    assert {each.output_tokens for each in trace.requests} == {3}
    assert [each.arrival for each in trace.requests] == sorted(each.arrival for each in trace.requests)
    assert trace.requests[0].arrival == 0
    assert trace.requests[0].prompt_tokens == records_of(tmp_path / "a")[0]["prompt_tokens"]


async def test_records_are_counted(model_dir, tmp_path):
    async with recording_frontends(model_dir, tmp_path / "a") as frontends:
        await asyncio.gather(*(post(frontends, "/v1/completions", COMPLETION) for _ in range(3)))
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{frontends.url}/metrics", timeout=60)).text
    assert differences(page, ROUTER) == []
    assert "fleet_access_records_total 3.0" in page
    assert "fleet_access_records_dropped_total 0.0" in page
