"""The endpoint picker over a real port, asked by a gateway that the test plays: each rule of its protocol, and bad input."""

import asyncio
import hashlib
import json
import os
import random
import subprocess
from contextlib import asynccontextmanager
from functools import cache

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client import CollectorRegistry

from fleet.adapters.clock import SystemClock
from fleet.adapters.endpoint_picker import (
    AnswerCounter,
    EndpointPicker,
    RoutersPrompts,
    endpoint_at,
    open_endpoint_picker,
)
from fleet.adapters.ext_proc import PREFILL, SERVICE
from fleet.adapters.grpc_selection import SelectingWorkers, SelectionService
from fleet.adapters.text_codec import load_codec
from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId
from fleet.roles import Role
from fleet.router.generation import Generation
from fleet.router.machine import RouterMachine
from fleet.router.messages import WorkerDraining, WorkerJoined, WorkerLeft
from fleet.router.picker_settings import EndpointPickerSettings
from fleet.router.server import RouterServer
from fleet.router.settings import RouterSettings
from fleet.router.tenants import Tenants, TenantSettings
from fleet.router.tokenising import TokenisingThreads
from fleet.telemetry import Metrics
from fleet.v1 import ext_proc_pb2 as pb
from tests.builders import MODEL, a_description
from tests.gateways import CHAT, FULL_DUPLEX, a_completion, a_gateway, a_header_map
from tests.integration.test_replicas import FLEET
from tests.openai_servers import OpenAiServer, until

pytestmark = pytest.mark.integration

LONG = [number * number % 401 + 50 for number in range(1000)]
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


a_codec = cache(load_codec)


class Untouched:
    """Workers that must not be asked for anything."""

    def start(self, worker_id, start):
        raise AssertionError("work was sent")

    def cancel(self, worker_id, request_id):
        raise AssertionError("work was cancelled that was never sent")


class World:
    def __init__(self, router, picker, gateway, tenants):
        self.router = router
        self.picker = picker
        self.gateway = gateway
        self.tenants = tenants

    def request(self):
        return self.gateway.request()

    def booked(self):
        """Requests by worker; of the idle ones nothing."""
        pools = self.router.status().pools
        return {each.worker_id: each.booked_requests for pool in pools for each in pool.workers if each.booked_requests}

    def blocks(self):
        return sum(each.booked_blocks for pool in self.router.status().pools for each in pool.workers)

    async def idle(self):
        await until(lambda: not self.booked() and not self.picker.held_bytes)
        assert self.router.status().active == 0


def joined(worker_id, address, role=Role.DECODE, **fields):
    return WorkerJoined(description=a_description(worker_id=worker_id, role=role, **fields), address=address)


D1 = joined("d1", "10.0.0.1:8000")
D2 = joined("d2", "10.0.0.2:8000")
P1 = joined("p1", "10.0.1.1:8000", Role.PREFILL)


@asynccontextmanager
async def a_world(model_dir, *workers, picker=None, standing=None, tenants=None, connection_seconds=0, **settings):
    clock, threads = SystemClock(), TokenisingThreads()
    known = Tenants(tenants or {}, clock.now())
    selecting = SelectingWorkers(Untouched())
    router = RouterServer(RouterMachine(RouterSettings(**settings), random.Random(0)), selecting, clock)
    for worker in workers:
        router.hear(worker)
    generation = Generation(
        router,
        {MODEL: a_codec(model_dir)},
        clock=clock,
        tenants=known,
        tenant_secret=b"",
        metrics=Metrics(CollectorRegistry()),
        threads=threads,
    )
    selection = SelectionService(router, selecting, tenant_secret=b"")
    limits = EndpointPickerSettings(**{"host": "127.0.0.1", "port": 0, **(picker or {})})
    made = EndpointPicker(limits, router, selection, RoutersPrompts(generation, None, known, clock), standing)
    async with (
        asyncio.timeout(60),
        open_endpoint_picker(limits, made, connection_seconds=connection_seconds),
        a_gateway(made.address) as gateway,
    ):
        yield World(router, made, gateway, known)
    threads.close()


# What the protocol asks for


async def test_the_endpoint_is_told_in_a_header_and_in_metadata_alike_and_the_body_goes_on_as_it_came(model_dir):
    async with a_world(model_dir, D1, picker={"fallbacks": 0}) as world:
        request = world.request()
        picked = await request.ask(a_completion())  # which compares the two

        assert picked.endpoints == ["10.0.0.1:8000"]
        assert (picked.body, picked.headers["content-length"]) == (a_completion(), f"{len(a_completion())}")
        assert picked.prefill is None
        assert picked.removed == [PREFILL], "what a client made up reaches no sidecar"
        assert world.booked() == {"d1": 1}
        await request.over()


async def test_a_body_in_pieces_is_placed_when_it_is_whole_and_a_long_one_goes_on_in_pieces_that_gateways_take(
    model_dir,
):
    body = a_completion() + b" " * 200_000
    async with a_world(model_dir, D1) as world:
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
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await request.head()
        await request.body(a_completion(), ends=False)
        await request.say(request_trailers=pb.HttpTrailers(trailers=a_header_map({"x": "y"})))
        picked = await request.picked()
        assert picked.endpoints == ["10.0.0.1:8000"]
        assert picked.body == a_completion()


async def test_a_chat_is_rendered_and_placed_like_one_that_the_router_serves_itself(model_dir):
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()
    async with a_world(model_dir, D1) as world:
        assert (await world.request().ask(body, CHAT)).endpoints == ["10.0.0.1:8000"]


async def test_requests_spread_since_each_sees_the_bookings_of_those_before(model_dir):
    async with a_world(model_dir, D1, D2) as world:
        requests = [world.request() for _ in range(4)]
        for number, request in enumerate(requests):
            await request.ask(a_completion([number + 1] * 40))
        assert world.booked() == {"d1": 2, "d2": 2}


async def test_other_endpoints_follow_the_best_one_for_gateways_that_try_again(model_dir):
    async with a_world(model_dir, D1, D2, joined("d3", "10.0.0.3:8000"), picker={"fallbacks": 2}) as world:
        picked = await world.request().ask(a_completion())
        assert sorted(picked.endpoints) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
        assert world.booked() == {f"d{picked.endpoints[0][7]}": 1}


@pytest.mark.parametrize("subset", [["10.0.0.2:8000"], ["10.9.9.9:1", "10.0.0.2:8000"], "10.9.9.9:1, 10.0.0.2:8000"])
async def test_only_endpoints_that_the_gateway_allows_are_picked(model_dir, subset):
    async with a_world(model_dir, D1, D2) as world:
        for number in range(3):
            picked = await world.request().ask(a_completion([number + 1] * 40), subset=subset)
            assert picked.endpoints == ["10.0.0.2:8000"]
        assert world.booked() == {"d2": 3}


@pytest.mark.parametrize(
    "written",
    ["[fd00::2]:8000", "fd00::2:8000", "[fd00:0:0:0:0:0:0:2]:8000", "fd00:0000:0000:0000:0000:0000:0000:0002:8000"],
)
async def test_an_endpoint_is_the_same_however_a_gateway_spells_it(model_dir, written):
    async with a_world(model_dir, D1, joined("d2", "[fd00::2]:8000"), picker={"fallbacks": 0}) as world:
        request = world.request()
        assert (await request.ask(a_completion(), subset=["[fd00::3]:1", f" {written} "])).endpoints == [
            "[fd00::2]:8000"
        ]
        await request.answer_begins(served=written)
        assert world.booked() == {"d2": 1}, "it did answer from there"
        await request.answer_goes_on(EVENT, ends=True)
    async with a_world(model_dir, D1, picker={"router_endpoint": "[fd00::2]:8000"}) as world:
        assert (await world.request().ask(b"any", subset=[written])).endpoints == ["[fd00::2]:8000"]


@pytest.mark.parametrize("entry", ["", ",", "fd00::2", "[fd00::2", "10.0.0.1:", "10.0.0.1:x", "a" * 100_000])
async def test_what_is_no_endpoint_allows_none(model_dir, entry):
    async with a_world(model_dir, D1) as world:
        assert (await world.request().ask(a_completion(), subset=[entry])).status == 503


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ["10.0.1.1:8000"], 7, [7, True, None], {"a": "b"}])
async def test_a_subset_without_a_ready_endpoint_is_answered_with_503(model_dir, subset):
    async with a_world(model_dir, D1, P1) as world:
        picked = await world.request().ask(a_completion(), subset=subset)
        assert picked.status == 503
        assert picked.error["code"] == "no_worker"
        await world.idle()


async def test_a_prefill_worker_outside_the_subset_takes_no_part(model_dir):
    async with a_world(model_dir, D1, P1) as world:
        alone = await world.request().ask(a_completion(LONG), subset=["10.0.0.1:8000"])
        assert (alone.endpoints, alone.prefill) == (["10.0.0.1:8000"], None)
        assert (await world.request().ask(a_completion(LONG[::-1]))).prefill == "10.0.1.1:8000"


@pytest.mark.parametrize("workers", [(), (joined("d1", "unix:/run/d1"),), (joined("d1", "host:80"),), (P1,)])
async def test_503_when_nothing_is_ready_that_a_gateway_can_reach(model_dir, workers):
    async with a_world(model_dir, *workers) as world:
        picked = await world.request().ask(a_completion())
        assert picked.status == 503
        assert picked.headers["content-type"] == "application/json"
        await world.idle()


async def test_429_with_a_hint_when_a_request_is_shed(model_dir):
    small = joined("d1", "10.0.0.1:8000", max_running=1)
    limits = {"wait_seconds": 0.05, "retry_after_ms": 2500}
    async with a_world(model_dir, small, picker=limits, oversubscribe=1.0) as world:
        await world.request().ask(a_completion())
        shed = await world.request().ask(a_completion())

        assert (shed.status, shed.headers["retry-after"]) == (429, "3")
        assert shed.error["code"] == "queue_full"
        assert world.booked() == {"d1": 1}
        assert world.router.status().queued == 0


async def test_a_full_queue_sheds_at_once(model_dir):
    small = joined("d1", "10.0.0.1:8000", max_running=1)
    async with a_world(model_dir, small, oversubscribe=1.0, max_queued=0) as world:
        await world.request().ask(a_completion())
        shed = await world.request().ask(a_completion())
        assert (shed.status, shed.headers["retry-after"]) == (429, "1")


async def test_a_waiting_request_gets_the_place_of_one_that_ends(model_dir):
    small = joined("d1", "10.0.0.1:8000", max_running=1)
    async with a_world(model_dir, small, oversubscribe=1.0) as world:
        first, second = world.request(), world.request()
        await first.ask(a_completion())
        await second.head()
        await second.body(a_completion())
        await until(lambda: world.router.status().queued == 1)
        await first.over()
        assert (await second.picked()).endpoints == ["10.0.0.1:8000"]


@pytest.mark.parametrize(("address", "endpoints"), [("10.0.0.2:8000", ["10.0.0.2:8000"]), ("unix:/run/d2", [])])
async def test_a_waiting_request_gets_a_worker_that_joins_if_gateways_can_reach_it(model_dir, address, endpoints):
    small = joined("d1", "10.0.0.1:8000", max_running=1)
    async with a_world(model_dir, small, oversubscribe=1.0) as world:
        first, second = world.request(), world.request()
        await first.ask(a_completion())
        await second.head()
        await second.body(a_completion())
        await until(lambda: world.router.status().queued == 1)
        world.router.hear(joined("d2", address))
        picked = await second.picked()
        assert (picked.endpoints, picked.status) == (endpoints, 0 if endpoints else 503)
        assert world.booked() == {"d1": 1} | ({"d2": 1} if endpoints else {})


async def test_the_prefill_worker_is_named_for_the_sidecar_and_its_share_ends_with_the_first_token(model_dir):
    async with a_world(model_dir, D1, P1) as world:
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


async def test_an_answer_passes_as_it_is_and_counts_as_load_until_its_last_byte(model_dir):
    async with a_world(model_dir, D1) as world:
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
    async with a_world(model_dir, D1) as world:
        for alone in (True, False):
            request = world.request()
            await request.ask(a_completion())
            await request.answer_begins(whole=alone)
            if not alone:
                await request.answer_goes_on(EVENT)
                await request.say(response_trailers=pb.HttpTrailers())
                assert (await request.hears()).WhichOneof("response") == "response_trailers"
            await world.idle()


async def test_an_answer_that_the_gateway_keeps_to_itself_is_only_waved_on(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        modes = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.STREAMED)
        await request.ask(a_completion(), modes=modes)
        await request.answer_begins()
        await request.say(response_body=pb.HttpBody(body=EVENT, end_of_stream=True))
        assert not (await request.hears()).response_body.response.HasField("body_mutation")
        await world.idle()


async def test_the_endpoint_that_answered_counts_and_not_the_one_that_was_picked(model_dir):
    async with a_world(model_dir, D1, D2) as world:
        request = world.request()
        picked = await request.ask(a_completion())
        first, second = (f"d{endpoint[7]}" for endpoint in picked.endpoints)
        assert world.booked() == {first: 1}
        await request.answer_begins(served=picked.endpoints[1])
        assert world.booked() == {second: 1}
        await request.answer_goes_on(EVENT)
        await request.answer_goes_on(EVENT, ends=True)
        await world.idle()


async def test_an_answer_from_elsewhere_takes_up_nobody(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await request.ask(a_completion())
        await request.answer_begins(served="10.9.9.9:1")
        assert world.booked() == {}
        assert await request.answer_goes_on(EVENT) == EVENT


async def test_a_request_without_a_body_or_for_another_path_goes_to_the_idlest_and_books_nothing(model_dir):
    async with a_world(model_dir, D1, D2, P1) as world:
        busy = await world.request().ask(a_completion())
        world.router.hear(joined("d3", "10.0.0.3:8000"))
        world.router.hear(WorkerDraining(worker_id=WorkerId("d3")))
        idle = {"10.0.0.1:8000", "10.0.0.2:8000"} - {busy.endpoints[0]}

        models = world.request()
        models.has_no_body = True
        await models.head("/v1/models", whole=True)
        assert set((await models.picked()).endpoints) == idle
        picked = await world.request().ask(b"any", "/tokenize?x=1")
        assert (set(picked.endpoints), picked.body) == (idle, b"any")
        assert sum(world.booked().values()) == 1


async def test_what_gateways_put_before_a_path_is_looked_past(model_dir):
    async with a_world(model_dir, D1) as world:
        await world.request().ask(a_completion(), "/team-a/v1/completions?api-version=1")
        assert world.booked() == {"d1": 1}


async def test_workers_are_reached_on_the_port_where_they_speak_http(model_dir):
    workers = (joined("d1", "http://10.0.0.1:9999/prefix"), joined("d2", "[fd00::2]:50060"))
    async with a_world(model_dir, *workers, picker={"target_port": 8080}) as world:
        picked = await world.request().ask(a_completion())
        assert sorted(picked.endpoints) == ["10.0.0.1:8080", "[fd00::2]:8080"]


class Told:
    """What the test says of the picker among others."""

    def __init__(self) -> None:
        self.leading, self.following, self.resigned = True, False, False

    def leads(self):
        return self.leading

    def follows(self):
        return self.following

    async def resign(self):
        self.resigned, self.leading, self.following = True, False, True


async def test_health_says_who_lives_and_who_is_ready(model_dir):
    told = Told()
    async with a_world(model_dir, standing=told) as world:

        async def serving(service):
            answer = await HealthStub(world.gateway.channel).Check(health_pb2.HealthCheckRequest(service=service))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        async def all_three():
            return [await serving(service) for service in ("liveness", "readiness", SERVICE)]

        assert await all_three() == [True, False, False], "without workers"
        world.router.hear(D1)
        assert await all_three() == [True, True, True]
        told.leading = False
        assert await all_three() == [True, False, False], "who could not renew"
        assert (await world.request().ask(a_completion())).endpoints, "but nobody else is known to lead"
        told.following = True
        assert await all_three() == [True, False, False], "a follower"
        refused = await world.request().ask(a_completion())
        assert (refused.status, refused.error["code"]) == (503, "draining")
        told.leading, told.following = True, False
        await world.picker.drain(Nanos(SECOND))
        assert await all_three() == [True, False, False], "while it goes away"
        assert told.resigned
        assert (await world.request().ask(a_completion())).endpoints, "gateways hear of it later"


async def test_who_watches_liveness_is_told_at_once(model_dir):
    async with a_world(model_dir) as world:
        watch = HealthStub(world.gateway.channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_draining_waits_for_answers_that_pass(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await request.ask(a_completion())
        draining = asyncio.ensure_future(world.picker.drain(Nanos(30 * SECOND)))
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT
        assert not draining.done()
        await request.over()
        await draining


async def test_a_gateways_connection_ends_in_time_and_no_request_does(model_dir):
    async with a_world(model_dir, D1, connection_seconds=0.2) as world:
        request, channel = world.request(), world.gateway.channel
        await request.ask(a_completion())
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        async with asyncio.timeout(20):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

        other = world.request()
        await other.ask(a_completion([7] * 40))
        assert world.booked() == {"d1": 2}, "over another connection"
        for each in (request, other):
            await each.answer_begins()
            assert await each.answer_goes_on(EVENT, ends=True) == EVENT
            await each.over()
        await world.idle()


async def test_a_router_can_name_itself_where_its_workers_speak_no_http(model_dir):
    own = "10.1.1.1:8000"
    async with a_world(model_dir, picker={"router_endpoint": own}) as world:
        assert (await world.request().ask(a_completion())).status == 503
        world.router.hear(joined("d1", "unix:/run/d1"))
        request = world.request()
        await request.head()
        await request.body(b"any", b"thing")
        picked = await request.picked()
        assert (picked.endpoints, picked.body, picked.pieces) == ([own], b"anything", 2)
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT
        assert (await world.request().ask(b"", subset=["10.9.9.9:1"])).status == 503
        assert world.booked() == {}


async def test_keys_of_tenants_are_asked_for_and_their_answers_charged(model_dir):
    tenants = {"a": TenantSettings(api_key_sha256=(hashlib.sha256(b"secret").hexdigest(),))}
    async with a_world(model_dir, D1, tenants=tenants) as world:
        assert (await world.request().ask(a_completion())).status == 401
        request = world.request()
        await request.ask(a_completion(), authorization="Bearer secret")
        await request.answer_begins("application/json")
        await request.answer_goes_on(b'{"usage": {"completion_tokens": 7}}', ends=True)
        assert dict(world.tenants.usage())["a"].answer_tokens == 7


async def test_servers_that_know_nothing_of_fleet_are_picked_by_what_they_were_sent(tmp_path):
    """`fleet serve router` with `endpoint_picker`, and nothing else between a gateway and two servers."""
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
    (tmp_path / "router.json").write_text(json.dumps(config))
    reading, writing = os.pipe()
    command = [*FLEET, "serve", "router", "--config", f"{tmp_path / 'router.json'}", "--ready-fd", f"{writing}"]
    process = subprocess.Popen(command, pass_fds=[writing])
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            address = json.loads(await asyncio.to_thread(ready.readline))["endpoint_picker"]
        prompts = [f"{letter} prompt of its own, " * 40 for letter in "ABCDEF"]
        async with a_gateway(address) as gateway:

            async def ask(prompt):
                request = gateway.request()
                # `n` is nothing that our own workers can do: what a server makes of the rest of a body is its own business.
                return request, (await request.ask(a_completion(prompt, model="mock", n=2))).endpoints

            async with asyncio.timeout(20):
                joined = 0
                while joined < 2:
                    request, endpoints = await ask("any")
                    joined = len(endpoints)
                    await request.over()
            went = []
            for together in (True, False):  # at first, so that load spreads them
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
            async with asyncio.timeout(20):  # another is to be made in time
                await gateway.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert set(went) == {server.url.removeprefix("http://") for server in servers}
        assert went[:6] == went[6:]
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 0
        for server in servers:
            await server.stop()


# Whose bookings end when


async def test_a_worker_that_is_lost_ends_the_booking_and_not_the_answer(model_dir):
    async with a_world(model_dir, D1, D2) as world:
        request = world.request()
        picked = await request.ask(a_completion())
        world.router.hear(WorkerLeft(worker_id=WorkerId(f"d{picked.endpoints[0][7]}")))
        await world.idle()
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT, ends=True) == EVENT


async def test_a_gateway_that_tells_nothing_loses_its_booking_and_can_go_on(model_dir):
    async with a_world(model_dir, D1, picker={"lease_seconds": 0.1}) as world:
        request = world.request()
        await request.ask(a_completion())
        await world.idle()
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT) == EVENT


async def at_head(request):
    await request.head()


async def at_body(request):
    await request.head()
    await request.body(a_completion()[:10], ends=False)


async def when_picked(request):
    await request.ask(a_completion())


async def while_answered(request):
    await request.ask(a_completion())
    await request.answer_begins()
    await request.answer_goes_on(EVENT)


async def when_answered(request):
    await while_answered(request)
    await request.answer_goes_on(EVENT, ends=True)


PHASES = [at_head, at_body, when_picked, while_answered, when_answered]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cut", [True, False], ids=["cancelled", "ended"])
async def test_a_call_that_ends_leaves_nothing_booked_at_whichever_phase(model_dir, phase, cut):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await phase(request)
        if cut:
            request.call.cancel()
        else:
            await request.over()
        await world.idle()


async def test_a_call_that_is_cancelled_while_its_request_waits_leaves_the_queue(model_dir):
    small = joined("d1", "10.0.0.1:8000", max_running=1)
    async with a_world(model_dir, small, oversubscribe=1.0) as world:
        first, waiting = world.request(), world.request()
        await first.ask(a_completion())
        await waiting.head()
        await waiting.body(a_completion())
        await until(lambda: world.router.status().queued == 1)
        waiting.call.cancel()
        await until(lambda: world.router.status().queued == 0)
        assert world.booked() == {"d1": 1}
        await first.over()
        await world.idle()


# What is wrong


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
        (a_completion(model="other"), 404, "model"),
        (a_completion(""), 400, "prompt"),
        (a_completion(temperature=9), 400, "temperature"),
        (a_completion(list(range(5000))), 400, None),
        (a_completion(fleet={"pin": "nobody"}), 400, "fleet.pin"),
    ],
)
async def test_a_request_that_is_wrong_is_answered_as_the_openai_api_does(model_dir, body, status, param):
    async with a_world(model_dir, D1) as world:
        picked = await world.request().ask(body)
        assert picked.status == status
        if param is not None:
            assert picked.error["param"] == param
        await world.idle()


async def test_a_body_that_is_too_long_is_refused_while_it_comes(model_dir):
    async with a_world(model_dir, D1, picker={"max_body_bytes": 10_000}) as world:
        request = world.request()
        await request.head()
        await request.body(b" " * 6000, b" " * 6000, ends=False)
        picked = await request.picked()
        assert (picked.status, picked.error["code"]) == (413, "too_large")
        assert await request.hears() is None
        await world.idle()


async def test_bodies_that_together_take_too_much_are_shed(model_dir):
    async with a_world(model_dir, D1, picker={"max_held_bytes": 10_000}) as world:
        slow, other = world.request(), world.request()
        await slow.head()
        await slow.body(b" " * 8000, ends=False)
        await until(lambda: world.picker.held_bytes == 8000)
        assert (await other.ask(b" " * 8000)).status == 429
        slow.call.cancel()
        await world.idle()
        assert (await world.request().ask(a_completion() + b" " * 8000)).endpoints


async def test_a_request_that_does_not_come_is_given_up(model_dir):
    async with a_world(model_dir, D1, picker={"body_seconds": 0.1}) as world:
        request = world.request()
        await request.head()
        await request.body(b"{", ends=False)
        assert (await request.picked()).status == 504
        assert await request.hears() is None
        await world.idle()


BODY = pb.HttpBody(body=a_completion(), end_of_stream=True)
HEADERS = pb.HttpHeaders(headers=a_header_map({":path": "/v1/completions"}))
OUT_OF_TURN = [
    (),
    ({"request_body": BODY},),
    ({"response_headers": HEADERS},),
    ({"response_body": BODY},),
    ({"request_trailers": pb.HttpTrailers()},),
    ({"request_headers": HEADERS}, {"request_headers": HEADERS}),
    ({"request_headers": HEADERS}, {"response_body": BODY}),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"request_body": BODY}),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"response_trailers": pb.HttpTrailers()}),
    (
        {"request_headers": HEADERS},
        {"request_body": BODY},
        {"response_headers": HEADERS},
        {"response_headers": HEADERS},
    ),
    ({"request_headers": HEADERS}, {"request_body": BODY}, {"response_headers": HEADERS}, {"request_body": BODY}),
    (
        {"request_headers": HEADERS},
        {"request_body": BODY},
        {"response_headers": HEADERS},
        {"response_body": BODY},
        {"response_body": BODY},
    ),
]


async def status_of(call):
    async def to_the_end():
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end()
    return caught.value.code()


@pytest.mark.parametrize("messages", OUT_OF_TURN)
async def test_messages_out_of_turn_end_the_call_and_leave_nothing_booked(model_dir, messages):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        for message in messages or ({},):
            await request.say(**message)
        assert await status_of(request.call) is grpc.StatusCode.INVALID_ARGUMENT
        await world.idle()


@pytest.mark.parametrize("content", [b"\xff", b"\x12\xff\xff\xff\xff\x0f", b"\x22\x05abc", b"GET / HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_no_message_end_the_call(model_dir, content):
    async with a_world(model_dir, D1) as world:
        call = world.gateway.raw()
        await call.write(content)
        assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_with_nothing_in_it_ends(model_dir):
    async with a_world(model_dir, D1) as world:
        await world.request().over()


async def test_an_answer_of_the_gateways_own_may_come_before_the_request_is_whole(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await at_body(request)
        await request.answer_begins("text/plain")
        assert await request.answer_goes_on(b"too slow", ends=True) == b"too slow"
        await world.idle()


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL, 5, 77])
async def test_a_gateway_that_keeps_bodies_to_itself_is_told_what_to_set(model_dir, mode):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await request.head(modes=pb.ProtocolConfiguration(request_body_mode=mode))
        picked = await request.picked()
        assert picked.status == 500
        assert "FULL_DUPLEX_STREAMED" in picked.error["message"]


async def test_gateways_that_do_not_say_how_they_send_bodies_send_them_both_ways(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        assert (await request.ask(a_completion(), modes=None)).endpoints
        await request.answer_begins()
        assert await request.answer_goes_on(EVENT) == EVENT


async def test_who_only_watches_is_told_nothing_and_books_nothing(model_dir):
    async with a_world(model_dir, D1) as world:
        request = world.request()
        await request.say(request_headers=HEADERS, observability_mode=True, protocol_config=FULL_DUPLEX)
        await request.say(request_body=BODY, observability_mode=True)
        await request.over()
        assert world.booked() == {}


@pytest.mark.parametrize(
    ("address", "port", "endpoint"),
    [
        ("10.0.0.1:50060", 0, "10.0.0.1:50060"),
        ("10.0.0.1:50060", 8000, "10.0.0.1:8000"),
        ("10.0.0.1", 8000, "10.0.0.1:8000"),
        ("http://10.0.0.1/v1", 0, "10.0.0.1:80"),
        ("https://10.0.0.1", 0, "10.0.0.1:443"),
        ("[fd00::2]:1", 0, "[fd00::2]:1"),
        ("[FD00:0::2]:1", 0, "[fd00::2]:1"),
        ("10.0.0.1", 0, ""),
        ("worker-1:50060", 0, ""),
        ("unix:/run/w", 8000, ""),
        ("10.0.0.1:99999", 0, ""),
        ("[fd00:", 0, ""),
        ("", 0, ""),
    ],
)
def test_workers_without_an_address_for_gateways_have_no_endpoint(address, port, endpoint):
    assert endpoint_at(address, port) == endpoint


@pytest.mark.parametrize(
    ("given", "own"),
    [("", ""), ("10.1.1.1:8000", "10.1.1.1:8000"), ("fd00::1:8000", "[fd00::1]:8000"), ("[::1]:80", "[::1]:80")],
)
def test_a_routers_own_endpoint_is_what_pods_are_told_of_themselves(given, own):
    assert EndpointPickerSettings(router_endpoint=given).own_endpoint == own


@pytest.mark.parametrize("given", ["router:8000", "10.1.1.1", ":8000", "10.1.1.1:0", "10.1.1.1:x", "10.1.1.1:8000/x"])
def test_a_routers_own_endpoint_that_gateways_cannot_take_is_refused(given):
    with pytest.raises(ValueError, match="must be ip:port"):
        EndpointPickerSettings(router_endpoint=given)


@pytest.mark.parametrize(
    ("events", "pieces", "tokens"),
    [
        (True, [EVENT * 3, b"data: [DONE]\n\n"], 3),
        (True, [EVENT[:3], EVENT[3:6], EVENT[6:] + EVENT, EVENT], 3),
        (False, [b'{"usage": {"completion_', b'tokens": 12', b"3}}"], 123),
        (False, [b"<html>"], 0),
        (False, [b'{"completion_tokens": 99999999999999999999}'], 0),
    ],
)
def test_tokens_are_counted_as_they_pass(events, pieces, tokens):
    counter = AnswerCounter()
    counter.events = events
    assert sum(counter.count(piece) for piece in pieces) == tokens == counter.tokens


async def test_whatever_gateways_send_the_books_are_balanced_in_the_end(model_dir):
    """Sixty calls side by side, each with a random course and end, while workers come and go."""
    chance = random.Random(7)
    bodies = [a_completion([number] * 40) for number in range(5)] + [a_completion(LONG), b"{", b""]
    served = ["", "", "10.0.0.1:8000", "10.0.0.2:8000", "10.9.9.9:1"]

    async def call(world):
        request = world.request()
        body, modes = chance.choice(bodies), chance.choice([FULL_DUPLEX, FULL_DUPLEX, None])

        async def whole_body():
            await request.body(body[:9], body[9:])
            await request.picked()

        steps = [
            lambda: request.head(subset=chance.choice([None, None, ["10.0.0.1:8000"], []]), modes=modes),
            whole_body,
            lambda: request.answer_begins(served=chance.choice(served)),
            lambda: request.answer_goes_on(EVENT),
            lambda: request.answer_goes_on(EVENT * 40),
            lambda: request.answer_goes_on(b"", ends=True),
        ]
        if chance.random() < 0.3:
            steps.insert(chance.randrange(6), lambda: request.say(**chance.choice(chance.choice(OUT_OF_TURN[1:]))))
        try:
            for step in steps[: chance.randrange(1, 8)]:
                await step()
                await asyncio.sleep(chance.random() / 100)
            if chance.random() < 0.5:
                await request.over()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, AssertionError, AttributeError):
            pass  # the picker has ended the call
        request.call.cancel()

    small = {"max_running": 4}
    async with a_world(
        model_dir, D1, P1, joined("d2", "10.0.0.2:8000", **small), picker={"wait_seconds": 0.05}
    ) as world:
        async with asyncio.TaskGroup() as calls:
            for number in range(60):
                calls.create_task(call(world))
                if number % 20 == 10:
                    world.router.hear(WorkerLeft(worker_id=WorkerId("d2")))
                    await asyncio.sleep(0.02)
                    world.router.hear(joined("d2", "10.0.0.2:8000", **small))
        await world.idle()
        world.router._machine.check()
        assert world.router.status().counters.ended > 20
        assert not world.picker.selection._bookings
