"""Tests of streams with event ids over HTTP, in front of a router whose answers the test writes."""

import json

import httpx
import pytest

from tests.support.frontend.http_clients import error_of, sse_events
from tests.support.frontend.text_model import EOS

pytestmark = pytest.mark.integration

TEXT = "Zwölf 漢字 🎉 of STOP, STOPPED"
RESUMABLE = {"x-fleet-resumable": "1"}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
COMPLETION = ("/v1/completions", {"prompt": "x"})


def body_of(body, **fields):
    return {**body, "max_tokens": 100, "temperature": 0, "stream": True, **fields}


async def stream(url, path, body, headers=RESUMABLE):
    """Return the status, and the events as pairs of id and data."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        answer = await client.post(path, json=body, headers=headers)
    return answer.status_code, sse_events(answer.text), answer.content


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
@pytest.mark.parametrize("fields", [{}, {"stop": ["STOPPED"], "stream_options": {"include_usage": True}}])
async def test_stream_cut_after_any_event_goes_on_with_same_bytes(frontends, path, body, fields):
    frontends.will_answer(TEXT, then=(EOS,))
    body = body_of(body, **fields)
    _, whole, _ = await stream(frontends.url, path, body)
    assert all(number for number, _ in whole)
    assert whole[-1][1] == "[DONE]"

    for cut, (number, _) in enumerate(whole, 1):
        status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": number})
        assert status == 200, rest
        assert [data for _, data in rest] == [data for _, data in whole[cut:]], cut


async def test_stream_without_the_header_has_no_ids(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = CHAT
    _, events, content = await stream(frontends.url, path, body_of(body), {})
    assert len(events) > 3
    assert b"id:" not in content.replace(b'"id":', b"")


async def test_field_of_the_body_asks_for_ids_as_the_header_does(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = COMPLETION
    _, events, _ = await stream(frontends.url, path, body_of(body, fleet={"resumable": True}), {})
    assert all(number for number, _ in events)


async def test_random_answer_goes_on_after_its_journal(frontends):
    """Only the journal knows the tokens, because none can be generated again."""
    path, body = COMPLETION
    answer = frontends.will_answer(TEXT, then=(EOS,))
    body = body_of(body, temperature=1)
    _, whole, _ = await stream(frontends.url, path, body)

    _, rest, _ = await stream(frontends.url, path, body, {"last-event-id": whole[3][0]})

    assert [data for _, data in rest] == [data for _, data in whole[4:]]
    assert frontends.router.submitted[-1].answered == tuple(answer[: int(whole[3][0].rpartition(".")[2])])


async def test_resumed_stream_keeps_id_and_has_its_own_in_the_header(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = CHAT
    _, whole, _ = await stream(frontends.url, path, body_of(body), {**RESUMABLE, "x-request-id": "mine"})
    async with httpx.AsyncClient(base_url=frontends.url, trust_env=False, timeout=60) as client:
        again = await client.post(path, json=body_of(body), headers={"last-event-id": whole[2][0]})
    assert again.headers["x-request-id"] == "mine.r1"
    assert {json.loads(data)["id"] for _, data in sse_events(again.text)[:-1]} == {"chatcmpl-mine"}


@pytest.mark.parametrize("event_id", ["x", "7", "a.b", "....", "x" * 9000, "AAAA.3"])
async def test_forged_event_id_is_refused_with_its_name(frontends, event_id):
    frontends.will_answer(TEXT)
    path, body = CHAT
    status, _, content = await stream(frontends.url, path, body_of(body), {"last-event-id": event_id})
    assert status == 400
    assert error_of(content)["param"] == "last-event-id"
    assert not frontends.router.submitted


async def test_event_id_for_another_prompt_is_refused(frontends):
    frontends.will_answer(TEXT)
    path, body = COMPLETION
    _, whole, _ = await stream(frontends.url, path, body_of(body))
    status, _, content = await stream(
        frontends.url, path, body_of(body, prompt="another"), {"last-event-id": whole[1][0]}
    )
    assert (status, error_of(content)["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (*COMPLETION[:1], {**COMPLETION[1], "n": 2}, "x-fleet-resumable"),
        (*COMPLETION[:1], {**COMPLETION[1], "logprobs": 1}, "x-fleet-resumable"),
        (*CHAT[:1], {**CHAT[1], "stream": False}, "x-fleet-resumable"),
        ("/v1/responses", {"input": "x"}, "x-fleet-resumable"),
    ],
)
async def test_request_that_cannot_be_resumed_is_refused(frontends, path, body, field):
    frontends.will_answer(TEXT)
    status, _, content = await stream(frontends.url, path, {"max_tokens": 9, "stream": True, **body})
    assert (status, error_of(content)["param"]) == (400, field)
