"""Tests of `fleet serve planner`: plans, elections, kills of the leader, and its commands. The orchestrator runs in the test."""

import asyncio
import json
import os
import random
import signal
import subprocess
from contextlib import asynccontextmanager, closing, contextmanager

import grpc
import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import ModelDemand, SampledRequest
from fleet.core.system_clock import SystemClock
from fleet.v1.planner_pb2 import ShowPlanRequest
from fleet.v1.planner_pb2_grpc import PlannerStub
from kvstore.protocol.range_messages import range_message
from kvstore.protocol.versions import own_protocols
from tests.support.fleet_processes import FLEET, run_fleet
from tests.support.kvstore.builders import a_short_folder
from tests.support.planner.connectors import FakeOrchestrator
from tests.support.planner.demand_routers import DemandRouter, serve_demand
from tests.support.servers.etcd import an_etcd_server
from tests.support.servers.prometheus import RouterPage, a_prometheus_server
from tests.support.versions.newer_peers import FUTURE
from tests.support.waiting import pace, until, until_answered

pytestmark = pytest.mark.integration

LEAST, MOST = 1, 4
KILLS = 6
"""Kills of the leader in a normal run; the variable FLEET_PLANNER_KILLS names another number."""


@pytest.fixture
def folder():
    with a_short_folder() as found:
        (found / "plans").mkdir()
        yield found


class Orchestrator:
    """An orchestrator in the test, which notes every number that was wanted."""

    def __init__(self, folder):
        self._plans = folder / "plans"
        self.wanted = {"decode": {1}, "prefill": {1}}
        self.inner = FakeOrchestrator(7, self._read, self._write)

    async def _read(self):
        try:
            content = (self._plans / "plan.json").read_bytes()
        except FileNotFoundError:
            return b""
        for name, pool in json.loads(content)["pools"].items():
            self.wanted[name].add(pool["replicas"])
        return content

    async def _write(self, content):
        beside = self._plans / ".report"
        beside.write_bytes(content)
        beside.rename(self._plans / "report.json")

    def ready(self):
        return {
            name: pool["ready"] for name, pool in json.loads((self._plans / "report.json").read_text())["pools"].items()
        }


@asynccontextmanager
async def a_cluster(folder, router=None):
    """Yield the orchestrator and the router of a cluster without workers."""
    orchestrator, router = Orchestrator(folder), router or DemandRouter()
    async with serve_demand(router, f"unix:{folder}/router.sock"), asyncio.TaskGroup() as tasks:
        await orchestrator.inner.step()
        running = tasks.create_task(orchestrator.inner.run())
        yield orchestrator, router
        running.cancel()


def settings(folder, number=0, **changes):
    bounds = {"least": LEAST, "most": MOST, "start_seconds": 1, "drain_seconds": 1}
    return {
        "model": "tiny",
        "mode": "active",
        "goals": {"ttft_seconds": 1.0, "tpot_seconds": 0.1},
        "pools": [{"name": "decode", "role": "decode", **bounds}, {"name": "prefill", "role": "prefill", **bounds}],
        "rule": {"kind": "load", "requests_per_replica": 4, "interval_seconds": 0.2, "cool_down_seconds": 0.5},
        "source": {"kind": "routers", "addresses": [f"unix:{folder}/router.sock"], "stale_seconds": 2},
        "target": {"kind": "folder", "folder": f"{folder}/plans"},
        "election": {"kind": "file", "path": f"{folder}/leader"},
        "identity": f"planner-{number}",
        "listen": f"unix:{folder}/planner-{number}.sock",
        "history": f"{folder}/history.jsonl",
        "score_seconds": 0.5,
        **changes,
    }


@contextmanager
def planners(folder):
    """Yield a function that starts planners; all of them are killed at the end."""
    started = []

    def start(number=0, **changes):
        file = folder / f"planner-{number}.json"
        file.write_text(json.dumps(settings(folder, number, **changes)))
        with (folder / f"planner-{number}.log").open("a") as log:
            process = subprocess.Popen([*FLEET, "serve", "planner", "--config", str(file)], stderr=log)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait(30)
        for log in sorted(folder.glob("planner-*.log")):
            print(log.name, log.read_text()[-20_000:], sep="\n")  # pytest shows it if the test fails
        history = folder / "history.jsonl"
        print(history.read_text()[-20_000:] if history.exists() else "no history")


async def fleet(*arguments):
    done = await asyncio.to_thread(run_fleet, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_planner_grows_and_shrinks_pools_and_explains_it(folder):
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            router.running = {"decode-0": 10, "prefill-0": 5}
            start()
            await until(lambda: orchestrator.ready() == {"decode": 3, "prefill": 2})
            router.running = {"decode-0": 1}
            await until(lambda: orchestrator.ready() == {"decode": 1, "prefill": 1})

            address = f"unix:{folder}/planner-0.sock"
            status = json.loads(await fleet("plan", "--json", "--planner", address))
            plan = status["plans"][-1]["id"]
            told = await fleet("explain", "--plan", plan, "--planner", address)
            record = json.loads(await fleet("explain", "--plan", plan, "--json", "--planner", address))
    assert (status["mode"], status["leads"], status["reason"]) == ("active", True, "within_band")
    assert record["replicas"] == {"decode": 3, "prefill": 2}
    assert (record["state"], record["reason"]) == ("settled", "load_up")
    assert "decode 1 to 3, prefill 1 to 2" in told
    assert "not rehearsed: rehearsals are off" in told


async def test_shadow_planner_shows_plans_and_applies_none(folder):
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            router.running = {"decode-0": 10}
            start(mode="shadow")
            history = folder / "history.jsonl"
            await until(lambda: history.exists() and '"score":{' in history.read_text())
            status = json.loads(await fleet("plan", "--json", "--planner", f"unix:{folder}/planner-0.sock"))
    assert (status["mode"], status["replicas"]["decode"]) == ("shadow", 3)
    assert [(each["state"], each["replicas"]) for each in status["plans"]] == [("shadow", {"decode": 3})]
    assert orchestrator.wanted == {"decode": {1}, "prefill": {1}}


async def test_planner_refuses_incompatible_callers_by_name(folder):
    own = f"speaks protocol {own_protocols().lowest} to {own_protocols().highest} (version "
    async with a_cluster(folder):
        with planners(folder) as start:
            start()
            await until((folder / "planner-0.sock").exists)
            async with grpc.aio.insecure_channel(f"unix:{folder}/planner-0.sock") as channel:
                stub = PlannerStub(channel)
                for call in (stub.ShowPlan, lambda request, **fields: stub.WatchPlan(request, **fields).read()):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call(ShowPlanRequest(protocols=FUTURE), timeout=60, wait_for_ready=True)
                    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
                    assert refused.value.details().startswith(f"this planner {own}")
                    assert refused.value.details().endswith(
                        "the caller speaks protocol 7 to 9 (version 99.0); upgrade this planner"
                    )
                document = await stub.ShowPlan(ShowPlanRequest(protocols=range_message()), timeout=60)
    assert document.protocols == range_message()


async def test_number_of_a_person_stays(folder):
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            start()
            await fleet("scale", "decode=2", "--plans", f"{folder}/plans")
            router.running = {"decode-0": 16, "prefill-0": 8}
            await until(lambda: orchestrator.ready()["prefill"] == 2)
            shown = await fleet("plan", "--planner", f"unix:{folder}/planner-0.sock")
    assert orchestrator.ready()["decode"] == 2
    assert "pinned: fleet-scale has set it to 2" in shown


async def test_stale_demand_keeps_the_sizes(folder):
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            router.running = {"decode-0": 10}
            start()
            await until(lambda: orchestrator.ready()["decode"] == 3)
            changes = {"source": {"kind": "routers", "addresses": [f"unix:{folder}/nobody.sock"]}}
            start(1, **changes, election={"kind": "file", "path": f"{folder}/other"}, history="")

            async def holds():
                done = await asyncio.to_thread(
                    run_fleet, "plan", "--json", "--planner", f"unix:{folder}/planner-1.sock"
                )
                return done.returncode == 0 and json.loads(done.stdout)["reason"] == "no_signal" and done.stdout

            told = await until_answered(holds, 60.0)
    (condition,) = json.loads(told)["conditions"]
    assert condition["type"] == "NoDemandSignal"
    assert "nobody.sock: has not reported yet" in condition["message"]


async def test_killed_leader_is_followed_and_bounds_hold(folder):
    draw = random.Random(seed := int(os.environ.get("FLEET_TEST_SEED", "7")))
    kills = int(os.environ.get("FLEET_PLANNER_KILLS", str(KILLS)))
    print(f"seed {seed}, {kills} kills")
    leader = folder / "leader"
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            running = {number: start(number) for number in range(2)}
            for _ in range(kills):
                router.running = {"decode-0": draw.randrange(0, 30), "prefill-0": draw.randrange(0, 30)}

                def leading():
                    name = leader.read_text().strip() if leader.exists() else ""
                    number = int(name.rpartition("-")[2]) if name else -1
                    return number if number in running and running[number].poll() is None else None

                found = await until(lambda: (number := leading()) is not None and (number,))
                await pace(draw.uniform(0.0, 0.8), "a drawn moment of a plan")
                killed = running.pop(found[0])
                killed.send_signal(signal.SIGKILL)
                killed.wait(30)
                await until(lambda: leading() is not None)
                running[max(running) + 1] = start(max(running) + 1)
            router.running = {"decode-0": 10, "prefill-0": 6}
            # A plan without room lasts 32 s.
            await until(lambda: orchestrator.ready() == {"decode": 3, "prefill": 2}, 90.0)
    assert all(LEAST <= count <= MOST for counts in orchestrator.wanted.values() for count in counts)


async def test_etcd_elects_one_planner_and_the_next(folder):
    async with a_cluster(folder) as (orchestrator, router):
        with an_etcd_server() as etcd, planners(folder) as start:
            election = {"kind": "etcd", "endpoints": [etcd.address], "lease_seconds": 2}
            both = [start(number, election=election) for number in range(2)]

            async def leaders():
                found = []
                for number in range(2):
                    if both[number].poll() is None:
                        address = f"unix:{folder}/planner-{number}.sock"
                        done = await asyncio.to_thread(run_fleet, "plan", "--json", "--planner", address)
                        if done.returncode == 0 and json.loads(done.stdout)["leads"]:
                            found.append(number)
                return found

            first = await until_answered(leaders)
            both[first[0]].kill()
            both[first[0]].wait(30)
            router.running = {"decode-0": 10}
            await until(lambda: orchestrator.ready()["decode"] == 3, 60.0)
            second = await leaders()
    assert len(first) == len(second) == 1
    assert first != second


class BusyRouter(DemandRouter):
    """Counts one arrival more in each report, and has a busy worker from its second report on.

    So each report that shows the busy worker also brings an arrival, and a rehearsal has a rate.
    """

    def demand(self):
        self.running = {"decode-0": 10} if self.counted.arrivals > 1 else {}  # the watch reads once before its reports
        self.counted = ModelDemand(model="tiny", arrivals=self.counted.arrivals + 1)
        return super().demand()


async def test_rehearsal_is_part_of_the_record(folder):
    engine = {"kind": "linear", "latency": {"step_base_ms": 20.0}, "max_running": 4}
    patient = {
        "engines": {"decode": engine, "prefill": engine},
        "rehearsal": {"limit_seconds": 60},  # a busy machine gives the simulator, which is nice, little time
        "source": {"kind": "routers", "addresses": [f"unix:{folder}/router.sock"], "stale_seconds": 60},
    }
    router = BusyRouter()
    now = SystemClock().now()
    router.recent = [
        SampledRequest(
            model="tiny",
            arrived=Nanos(now - (60 - number) * SECOND // 10),
            prompt_tokens=100,
            answer_tokens=20,
            block_tokens=32,
            block_keys=(number, number + 1000, number + 2000),
        )
        for number in range(60)
    ]
    async with a_cluster(folder, router) as (orchestrator, _):
        with planners(folder) as start:
            start(**patient)
            await until(lambda: orchestrator.ready()["decode"] == 3, 120.0)
            records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    rehearsal = next(each["rehearsal"] for each in records if each["rehearsal"])
    assert rehearsal["requests"] >= 60
    assert 0.0 < rehearsal["planned"]["tpot_seconds"] < 1.0
    assert rehearsal["planned"]["ttft_seconds"] <= rehearsal["present"]["ttft_seconds"] + 0.001


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("pools", 0, "least"), 5, "pools[0].least: 5 is above `most`, 4"),
        (("pools", 1, "name"), "decode", "pools[1].name: 'decode' is there twice"),
        (("engines",), {"other": {"kind": "linear"}}, "engines.other: `pools` has no such pool"),
        (("rule",), {"kind": "fleet"}, "engines: has no engine of pool decode"),
        (("budget",), {"gpus": -1}, "budget.gpus"),
        (
            ("budget",),
            {"dollars_per_hour": 2.5, "least_ratio": 0.5, "most_ratio": 0.1},
            "budget.least_ratio: 0.5 is above",
        ),
        (("pools", 0, "gpu"), "h1000", "pools[0].gpu: 'h1000' is not one of "),
        (("pools", 0, "dollars_per_hour"), -3, "pools[0].dollars_per_hour: -3"),
        (("pools", 0, "start_seconds"), -1, "pools[0].start_seconds"),
        (("pools", 0, "gpus"), 0, "pools.decode: gpus must be at least 1"),
        (("prices",), "/none/prices.toml", "/none/prices.toml: No such file"),
        (("goals", "ttft_seconds"), -1, "goals.ttft_seconds"),
        (("listen",), "127.0.0.1:0", "listen: whoever reaches 127.0.0.1:0 could read the plans"),
        (("mode",), "fast", "mode"),
    ],
)
def test_wrong_settings_name_the_field(folder, path, value, told):
    wrong = settings(folder)
    place = wrong
    for each in path[:-1]:
        place = place[each]
    place[path[-1]] = value
    file = folder / "wrong.json"
    file.write_text(json.dumps(wrong))

    done = run_fleet("serve", "planner", "--config", str(file))

    assert done.returncode == 3
    assert told in done.stderr


def test_budget_below_the_floors_is_refused_by_field(folder):
    wrong = settings(folder, budget={"gpus": 7})
    for pool in wrong["pools"]:
        pool |= {"gpu": "h100", "gpus": 4, "least": 1}
    file = folder / "wrong.json"
    file.write_text(json.dumps(wrong))

    done = run_fleet("serve", "planner", "--config", str(file))

    assert done.returncode == 3
    assert "budget.gpus: 7 is below what the floors of the pools take, which is 8" in done.stderr


async def test_planners_of_one_folder_that_disagree_turn_nothing(folder):
    """Two active planners without an election want other numbers; one of them leads, and the numbers stay."""
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            router.running = {"decode-0": 8, "prefill-0": 1}
            for number, target in enumerate((4, 2)):
                rule = {
                    "kind": "load",
                    "requests_per_replica": target,
                    "interval_seconds": 0.2,
                    "cool_down_seconds": 0.5,
                }
                start(number, election=None, rule=rule)

            async def status(number):
                done = await asyncio.to_thread(
                    run_fleet, "plan", "--json", "--planner", f"unix:{folder}/planner-{number}.sock"
                )
                return json.loads(done.stdout) if done.returncode == 0 else None

            async def disagreeing():
                """Return what both say, once the one that does not lead has left its cool-down and wants its own number."""
                found = [await status(number) for number in range(2)]
                numbers = sorted(each["replicas"].get("decode", 0) for each in found if each)
                return found if numbers == [2, 4] else None

            shown = await until_answered(disagreeing)
            leaders = [each for each in shown if each["leads"]]
            assert len(leaders) == 1
            wanted = leaders[0]["replicas"]["decode"]
            await until(lambda: orchestrator.ready()["decode"] == wanted)
            before = json.loads((folder / "plans" / "plan.json").read_text())["revision"]
            since = (await status(0))["at_ms"]
            while (later := await status(1))["at_ms"] < since + 3000:
                assert later["pools"]
            after = json.loads((folder / "plans" / "plan.json").read_text())["revision"]
    assert after == before
    assert orchestrator.wanted["decode"] <= {1, wanted}


async def test_recorded_decisions_are_decided_again(folder):
    recording = folder / "decisions.jsonl"
    async with a_cluster(folder) as (orchestrator, router):
        with planners(folder) as start:
            router.running = {"decode-0": 10, "prefill-0": 5}
            process = start(record=str(recording))
            await until(lambda: orchestrator.ready() == {"decode": 3, "prefill": 2})
            router.running = {"decode-0": 0, "prefill-0": 0}
            await until(lambda: orchestrator.ready() == {"decode": 1, "prefill": 1})
            process.kill()
            process.wait(30)
    with recording.open("a") as file:
        file.write('{"type":"decision","now":')  # a line that a killed process has not finished
    other = settings(folder, record=str(recording), rule={"kind": "load", "requests_per_replica": 100})
    (folder / "other.json").write_text(json.dumps(other))

    same = await asyncio.to_thread(run_fleet, "plan", "decide", str(recording))
    json_too = await asyncio.to_thread(run_fleet, "plan", "decide", str(recording), "--json")
    changed = await asyncio.to_thread(
        run_fleet, "plan", "decide", str(recording), "--config", str(folder / "other.json")
    )

    assert (same.returncode, changed.returncode) == (0, 0), same.stderr + changed.stderr
    found = json.loads(json_too.stdout)
    assert found["decisions"] >= 5
    assert found["plans"] >= 4
    assert found["different"] == 0
    assert "0 decisions differ" in same.stdout
    assert "first different decision" in changed.stdout


async def test_planner_reads_the_demand_from_a_prometheus_server(folder):
    orchestrator, page = Orchestrator(folder), RouterPage("a")
    with closing(page), a_prometheus_server((page.target,)) as server:
        page.router.running = {"decode-0": 12, "prefill-0": 1}
        async with asyncio.TaskGroup() as tasks:
            await orchestrator.inner.step()
            running = tasks.create_task(orchestrator.inner.run())
            with planners(folder) as start:
                start(source={"kind": "prometheus", "url": server.url, "every_seconds": 0.2, "stale_seconds": 3})
                await until(lambda: orchestrator.ready() == {"decode": 3, "prefill": 1})
                server.kill()
                page.router.running = {}

                async def held():
                    done = await asyncio.to_thread(
                        run_fleet, "plan", "--json", "--planner", f"unix:{folder}/planner-0.sock"
                    )
                    status = json.loads(done.stdout)
                    return status if status["conditions"] else None

                status = await until_answered(held)
            running.cancel()
    (condition,) = status["conditions"]
    assert (condition["type"], condition["field"]) == ("NoDemandSignal", server.url)
    assert orchestrator.ready() == {"decode": 3, "prefill": 1}


async def test_command_says_that_a_planner_has_ended(folder):
    async with a_cluster(folder):
        with planners(folder) as start:
            process = start()
            await until_answered(lambda: answered(folder))
            process.kill()
            process.wait(30)
            for command in (("plan",), ("plan", "watch"), ("explain", "--plan", "plan-1-1")):
                done = await asyncio.to_thread(run_fleet, *command, "--planner", f"unix:{folder}/planner-0.sock")
                assert done.returncode == 1
                assert "no planner answers there now" in done.stderr
                assert "connect" not in done.stderr


async def answered(folder):
    done = await asyncio.to_thread(run_fleet, "plan", "--json", "--planner", f"unix:{folder}/planner-0.sock")
    return done.returncode == 0


def test_command_without_a_planner_says_how_to_start_one(folder):
    done = subprocess.run(
        [*FLEET, "plan"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "TMPDIR": str(folder)},
    )

    assert done.returncode == 3
    assert "fleet serve planner" in done.stderr
