"""Tests of the endpoint picker's protocol with a well-behaved gateway, rule by rule, over a real port."""

import asyncio
import hashlib
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.gateway.ext_proc import PREFILL, SERVICE
from fleet.router.messages import WorkerDraining
from fleet.router.tenants import TenantSettings
from fleet.v1 import ext_proc_pb2 as pb
from tests.support.backends.openai_servers import OpenAiServer
from tests.support.fleet_processes import start_service
from tests.support.gateway.endpoint_pickers import (
    D1,
    D2,
    EVENT,
    LONG,
    ONE_AT_A_TIME,
    P1,
    a_joined_endpoint,
    a_picker_setup,
)
from tests.support.gateway.envoy import CHAT, a_completion, a_gateway, a_header_map

pytestmark = pytest.mark.integration


# Protocol


async def test_endpoint_is_in_header_and_metadata_and_body_unchanged(model_dir):
    async with a_picker_setup(model_dir, D1, picker={"fallbacks": 0}) as world:
        request = world.request()
        picked = await request.ask(a_completion())  # this helper compares header and metadata

        assert picked.endpoints == ["10.0.0.1:8000"]
        assert (picked.body, picked.headers["content-length"]) == (a_completion(), f"{len(a_completion())}")
        assert picked.prefill is None
        assert picked.removed == [PREFILL], "a header of the client reaches no sidecar"
        assert world.booked() == {"d1": 1}
        await request.over()


async def test_chunked_body_is_placed_whole_and_forwarded_in_chunks(
    model_dir,
):
    body = a_completion() + b" " * 200_000
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.head()
        await request.body(body[:50], body[50:100_000], ends=False)
        assert world.booked() == {}
        await request.body(body[100_000:])
        picked = await request.picked()

        assert picked.body == body
        assert picked.pieces == 4
        assert world.booked() == {"d1": 1}
        assert world.picker.held_bytes == 0


async def test_trailers_end_a_body_too(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.head()
        await request.body(a_completion(), ends=False)
        await request.say(request_trailers=pb.HttpTrailers(trailers=a_header_map({"x": "y"})))
        picked = await request.picked()
        assert picked.endpoints == ["10.0.0.1:8000"]
        assert picked.body == a_completion()


async def test_chat_is_placed_like_one_served_by_the_router(model_dir):
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()
    async with a_picker_setup(model_dir, D1) as world:
        assert (await world.request().ask(body, CHAT)).endpoints == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"instructions": "Be brief.", "input": "hello"}),
        ("/v1/messages", {"system": "Be brief.", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}),
    ],
)
async def test_requests_of_translated_apis_are_placed_by_their_prompts(model_dir, path, body):
    async with a_picker_setup(model_dir, D1, D2, picker={"fallbacks": 0}) as world:
        sent = json.dumps({"model": "tiny", **body}).encode()
        picked = await world.request().ask(sent, path)
        assert picked.body == sent
        [(worker, _)] = world.booked().items()
        booked = world.blocks()
        assert booked > 0, "a request of an unknown path would reserve nothing"

        longer = json.loads(json.dumps(body).replace("Be brief.", "Be brief. " * 200))
        await world.request().ask(json.dumps({"model": "tiny", **longer}).encode(), path)
        assert world.blocks() > 2 * booked, "the blocks are those of the prompt"
        assert worker in world.booked()


async def test_concurrent_requests_see_each_others_reservations(model_dir):
    async with a_picker_setup(model_dir, D1, D2) as world:
        requests = [world.request() for _ in range(4)]
        for number, request in enumerate(requests):
            await request.ask(a_completion([number + 1] * 40))
        assert world.booked() == {"d1": 2, "d2": 2}


async def test_fallback_endpoints_follow_the_best_one(model_dir):
    async with a_picker_setup(
        model_dir, D1, D2, a_joined_endpoint("d3", "10.0.0.3:8000"), picker={"fallbacks": 2}
    ) as world:
        picked = await world.request().ask(a_completion())
        assert sorted(picked.endpoints) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
        assert world.booked() == {f"d{picked.endpoints[0][7]}": 1}


@pytest.mark.parametrize("subset", [["10.0.0.2:8000"], ["10.9.9.9:1", "10.0.0.2:8000"], "10.9.9.9:1, 10.0.0.2:8000"])
async def test_only_allowed_endpoints_are_picked(model_dir, subset):
    async with a_picker_setup(model_dir, D1, D2) as world:
        for number in range(3):
            picked = await world.request().ask(a_completion([number + 1] * 40), subset=subset)
            assert picked.endpoints == ["10.0.0.2:8000"]
        assert world.booked() == {"d2": 3}


@pytest.mark.parametrize(
    "written",
    ["[fd00::2]:8000", "fd00::2:8000", "[fd00:0:0:0:0:0:0:2]:8000", "fd00:0000:0000:0000:0000:0000:0000:0002:8000"],
)
async def test_endpoint_spellings_are_equivalent(model_dir, written):
    async with a_picker_setup(
        model_dir, D1, a_joined_endpoint("d2", "[fd00::2]:8000"), picker={"fallbacks": 0}
    ) as world:
        request = world.request()
        assert (await request.ask(a_completion(), subset=["[fd00::3]:1", f" {written} "])).endpoints == [
            "[fd00::2]:8000"
        ]
        await request.answer_begins(served=written)
        assert world.booked() == {"d2": 1}, "the earlier answer came from there"
        await request.answer_goes_on(EVENT, ends=True)
    async with a_picker_setup(model_dir, D1, picker={"router_endpoint": "[fd00::2]:8000"}) as world:
        assert (await world.request().ask(b"any", subset=[written])).endpoints == ["[fd00::2]:8000"]


@pytest.mark.parametrize("entry", ["", ",", "fd00::2", "[fd00::2", "10.0.0.1:", "10.0.0.1:x", "a" * 100_000])
async def test_invalid_endpoint_in_a_subset_allows_none(model_dir, entry):
    async with a_picker_setup(model_dir, D1) as world:
        assert (await world.request().ask(a_completion(), subset=[entry])).status == 503


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ["10.0.1.1:8000"], 7, [7, True, None], {"a": "b"}])
async def test_subset_without_a_ready_endpoint_gives_503(model_dir, subset):
    async with a_picker_setup(model_dir, D1, P1) as world:
        picked = await world.request().ask(a_completion(), subset=subset)
        assert picked.status == 503
        assert picked.error["code"] == "no_worker"
        await world.idle()


async def test_prefill_worker_outside_the_subset_is_not_used(model_dir):
    async with a_picker_setup(model_dir, D1, P1) as world:
        alone = await world.request().ask(a_completion(LONG), subset=["10.0.0.1:8000"])
        assert (alone.endpoints, alone.prefill) == (["10.0.0.1:8000"], None)
        assert (await world.request().ask(a_completion(LONG[::-1]))).prefill == "10.0.1.1:8000"


@pytest.mark.parametrize(
    "workers", [(), (a_joined_endpoint("d1", "unix:/run/d1"),), (a_joined_endpoint("d1", "host:80"),), (P1,)]
)
async def test_no_reachable_endpoint_gives_503(model_dir, workers):
    async with a_picker_setup(model_dir, *workers) as world:
        picked = await world.request().ask(a_completion())
        assert picked.status == 503
        assert picked.headers["content-type"] == "application/json"
        await world.idle()


async def test_shed_request_gives_429_with_a_retry_hint(model_dir):
    limits = {"wait_seconds": 0.05, "retry_after_ms": 2500}
    async with a_picker_setup(model_dir, ONE_AT_A_TIME, picker=limits, oversubscribe=1.0) as world:
        await world.request().ask(a_completion())
        shed = await world.request().ask(a_completion())

        assert (shed.status, shed.headers["retry-after"]) == (429, "3")
        assert shed.error["code"] == "queue_full"
        assert world.booked() == {"d1": 1}
        assert world.router.status().queued == 0


async def test_full_queue_sheds_at_once(model_dir):
    async with a_picker_setup(model_dir, ONE_AT_A_TIME, oversubscribe=1.0, max_queued=0) as world:
        await world.request().ask(a_completion())
        shed = await world.request().ask(a_completion())
        assert (shed.status, shed.headers["retry-after"]) == (429, "1")


async def test_queued_request_gets_a_freed_place(model_dir):
    async with a_picker_setup(model_dir, ONE_AT_A_TIME, oversubscribe=1.0) as world:
        first, waiting = await world.one_behind_another()
        await first.over()
        assert (await waiting.picked()).endpoints == ["10.0.0.1:8000"]


@pytest.mark.parametrize(("address", "endpoints"), [("10.0.0.2:8000", ["10.0.0.2:8000"]), ("unix:/run/d2", [])])
async def test_queued_request_gets_a_joining_reachable_worker(model_dir, address, endpoints):
    async with a_picker_setup(model_dir, ONE_AT_A_TIME, oversubscribe=1.0) as world:
        _, waiting = await world.one_behind_another()
        world.router.hear(a_joined_endpoint("d2", address))
        picked = await waiting.picked()
        assert (picked.endpoints, picked.status) == (endpoints, 0 if endpoints else 503)
        assert world.booked() == {"d1": 1} | ({"d2": 1} if endpoints else {})


async def test_prefill_worker_is_named_and_its_share_ends_early(model_dir):
    async with a_picker_setup(model_dir, D1, P1) as world:
        request = world.request()
        picked = await request.ask(a_completion(LONG))
        assert (picked.endpoints, picked.prefill) == (["10.0.0.1:8000"], "10.0.1.1:8000")
        assert world.booked() == {"d1": 1, "p1": 1}

        await request.answer_begins()
        assert world.booked() == {"d1": 1, "p1": 1}, "servers send headers before they have computed anything"
        await request.answer_goes_on(EVENT)
        assert world.booked() == {"d1": 1}
        await request.answer_goes_on(EVENT, ends=True)
        await world.idle()


async def test_answer_passes_unchanged_and_counts_until_its_end(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.ask(a_completion([5] * 40, max_tokens=200))
        await request.answer_begins()
        await request.answer_goes_on(EVENT)
        blocks = world.blocks()
        assert await request.answer_goes_on(EVENT * 64) == EVENT * 64
        assert world.blocks() == blocks + 2
        assert world.booked() == {"d1": 1}
        await request.answer_goes_on(b"", ends=True)
        await world.idle()
        await request.over()


async def test_trailers_end_an_answer_and_so_do_headers_alone(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        for alone in (True, False):
            request = world.request()
            await request.ask(a_completion())
            await request.answer_begins(whole=alone)
            if not alone:
                await request.answer_goes_on(EVENT)
                await request.say(response_trailers=pb.HttpTrailers())
                assert (await request.hears()).WhichOneof("response") == "response_trailers"
            await world.idle()


async def test_answer_kept_by_the_gateway_is_only_acknowledged(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        modes = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.STREAMED)
        await request.ask(a_completion(), modes=modes)
        await request.answer_begins()
        await request.say(response_body=pb.HttpBody(body=EVENT, end_of_stream=True))
        assert not (await request.hears()).response_body.response.HasField("body_mutation")
        await world.idle()


async def test_endpoint_that_answered_counts_not_the_picked_one(model_dir):
    async with a_picker_setup(model_dir, D1, D2) as world:
        request = world.request()
        picked = await request.ask(a_completion())
        first, second = (f"d{endpoint[7]}" for endpoint in picked.endpoints)
        assert world.booked() == {first: 1}
        await request.answer_begins(served=picked.endpoints[1])
        assert world.booked() == {second: 1}
        await request.answer_goes_on(EVENT)
        await request.answer_goes_on(EVENT, ends=True)
        await world.idle()


async def test_answer_from_an_unknown_endpoint_reserves_nothing(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.ask(a_completion())
        await request.answer_begins(served="10.9.9.9:1")
        assert world.booked() == {}
        assert await request.answer_goes_on(EVENT) == EVENT


async def test_request_without_body_goes_to_the_idlest_worker(model_dir):
    async with a_picker_setup(model_dir, D1, D2, P1) as world:
        busy = await world.request().ask(a_completion())
        world.router.hear(a_joined_endpoint("d3", "10.0.0.3:8000"))
        world.router.hear(WorkerDraining(worker_id=WorkerId("d3")))
        idle = {"10.0.0.1:8000", "10.0.0.2:8000"} - {busy.endpoints[0]}

        models = world.request()
        models.has_no_body = True
        await models.head("/v1/models", whole=True)
        assert set((await models.picked()).endpoints) == idle
        picked = await world.request().ask(b"any", "/tokenize?x=1")
        assert (set(picked.endpoints), picked.body) == (idle, b"any")
        assert sum(world.booked().values()) == 1


async def test_encoded_path_is_placed_like_the_plain_one(model_dir):
    """A server decodes it, and its prompt would not be counted."""
    async with a_picker_setup(model_dir, D1) as world:
        await world.request().ask(a_completion(), "/v1/%63ompletions")
        assert world.booked() == {"d1": 1}


async def test_path_prefix_of_the_gateway_is_ignored(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        await world.request().ask(a_completion(), "/team-a/v1/completions?api-version=1")
        assert world.booked() == {"d1": 1}


async def test_workers_are_named_by_their_http_port(model_dir):
    workers = (a_joined_endpoint("d1", "http://10.0.0.1:9999/prefix"), a_joined_endpoint("d2", "[fd00::2]:50060"))
    async with a_picker_setup(model_dir, *workers, picker={"target_port": 8080}) as world:
        picked = await world.request().ask(a_completion())
        assert sorted(picked.endpoints) == ["10.0.0.1:8080", "[fd00::2]:8080"]


class RecordingLeadership:
    """Leadership that the test sets."""

    def __init__(self) -> None:
        self.leading, self.following, self.resigned = True, False, False

    def leads(self):
        return self.leading

    def follows(self):
        return self.following

    async def resign(self):
        self.resigned, self.leading, self.following = True, False, True


async def test_health_reports_liveness_and_readiness(model_dir):
    told = RecordingLeadership()
    async with a_picker_setup(model_dir, standing=told) as world:

        async def serving(service):
            answer = await HealthStub(world.gateway.channel).Check(health_pb2.HealthCheckRequest(service=service))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        async def all_three():
            return [await serving(service) for service in ("liveness", "readiness", SERVICE)]

        assert await all_three() == [True, False, False], "there are no workers"
        world.router.hear(D1)
        assert await all_three() == [True, True, True]
        told.leading = False
        assert await all_three() == [True, False, False], "the leader could not renew its lease"
        assert (await world.request().ask(a_completion())).endpoints, "no other leader is known"
        told.following = True
        assert await all_three() == [True, False, False], "it is a follower"
        refused = await world.request().ask(a_completion())
        assert (refused.status, refused.error["code"]) == (503, "draining")
        told.leading, told.following = True, False
        await world.picker.drain(Nanos(SECOND))
        assert await all_three() == [True, False, False], "it is resigning"
        assert told.resigned
        assert (await world.request().ask(a_completion())).endpoints, "gateways notice later"


async def test_liveness_watch_is_answered_at_once(model_dir):
    async with a_picker_setup(model_dir) as world:
        watch = HealthStub(world.gateway.channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_draining_waits_for_passing_answers(model_dir):
    async with a_picker_setup(model_dir, D1) as world:
        request = world.request()
        await request.ask(a_completion())
        draining = asyncio.ensure_future(world.picker.drain(Nanos(30 * SECOND)))
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT
        assert not draining.done()
        await request.over()
        await draining


async def test_gateway_connection_ends_by_age_without_losing_calls(model_dir):
    async with a_picker_setup(model_dir, D1, connection_seconds=0.2) as world:
        request, channel = world.request(), world.gateway.channel
        await request.ask(a_completion())
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        async with asyncio.timeout(60):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

        other = world.request()
        await other.ask(a_completion([7] * 40))
        assert world.booked() == {"d1": 2}, "it uses another connection"
        for each in (request, other):
            await each.answer_begins()
            assert await each.answer_goes_on(EVENT, ends=True) == EVENT
            await each.over()
        await world.idle()


async def test_router_can_name_itself_as_the_endpoint(model_dir):
    own = "10.1.1.1:8000"
    async with a_picker_setup(model_dir, picker={"router_endpoint": own}) as world:
        assert (await world.request().ask(a_completion())).status == 503
        world.router.hear(a_joined_endpoint("d1", "unix:/run/d1"))
        request = world.request()
        await request.head()
        await request.body(b"any", b"thing")
        picked = await request.picked()
        assert (picked.endpoints, picked.body, picked.pieces) == ([own], b"anything", 2)
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT
        assert (await world.request().ask(b"", subset=["10.9.9.9:1"])).status == 503
        assert world.booked() == {}


async def test_tenant_keys_are_required_and_answers_charged(model_dir):
    tenants = {"a": TenantSettings(api_key_sha256=(hashlib.sha256(b"secret").hexdigest(),))}
    async with a_picker_setup(model_dir, D1, tenants=tenants) as world:
        assert (await world.request().ask(a_completion())).status == 401
        request = world.request()
        await request.ask(a_completion(), authorization="Bearer secret")
        await request.answer_begins("application/json")
        await request.answer_goes_on(b'{"usage": {"completion_tokens": 7}}', ends=True)
        assert dict(world.tenants.usage())["a"].answer_tokens == 7


async def test_external_backends_are_picked_by_earlier_prompts(tmp_path):
    """Run `fleet serve router` with `endpoint_picker` between a gateway and two servers."""
    servers = [OpenAiServer(), OpenAiServer()]
    for server in servers:
        await server.start()
    config = {
        "http_listen": "127.0.0.1:0",
        "grpc_listen": "127.0.0.1:0",
        "connection_seconds": 0.5,
        "endpoint_picker": {"host": "127.0.0.1", "port": 0},
        "openai_workers": [
            {"worker_id": f"w{number}", "url": server.url, "model": "mock"} for number, server in enumerate(servers)
        ],
    }
    process, endpoints = await asyncio.to_thread(start_service, "router", config, tmp_path / "router.json")
    try:
        address = endpoints["endpoint_picker"]
        prompts = [f"{letter} prompt of its own, " * 40 for letter in "ABCDEF"]
        async with a_gateway(address) as gateway:

            async def ask(prompt):
                request = gateway.request()
                # Our own workers do not support `n`; for external backends the rest of a body is their own business.
                return request, (await request.ask(a_completion(prompt, model="mock", n=2))).endpoints

            async with asyncio.timeout(60):
                joined = 0
                while joined < 2:
                    request, endpoints = await ask("any")
                    joined = len(endpoints)
                    await request.over()
            went = []
            for together in (True, False):  # together first, so that load spreads them
                open_requests = []
                for prompt in prompts:
                    request, endpoints = await ask(prompt)
                    went.append(endpoints[0])
                    open_requests.append(request)
                    if not together or len(open_requests) == len(prompts):
                        for each in open_requests:
                            await each.answer_begins()
                            await each.answer_goes_on(EVENT, ends=True)
                        open_requests.clear()
            async with asyncio.timeout(60):  # a new connection has to be made in time
                await gateway.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert set(went) == {server.url.removeprefix("http://") for server in servers}
        assert went[:6] == went[6:]
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0
        for server in servers:
            await server.stop()
