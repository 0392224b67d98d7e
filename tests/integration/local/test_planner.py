"""Tests of `fleet up` with a planner: real processes start and end as the load rises and falls, and no request fails."""

import asyncio
import json
import random

import pytest

from fleet.client import AsyncClient
from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TOPOLOGY = """
[[pools]]
role = "decode"
max_running = 8
[pools.simulated.latency]
step_base_ms = 20.0

[planner]
mode = "{mode}"
goals = {{ttft_seconds = 1.0, tpot_seconds = 0.05}}
rule = {{kind = "load", requests_per_replica = 3, interval_seconds = 0.5, cool_down_seconds = 3}}
[planner.pools.decode]
least = 1
most = 3
start_seconds = 30
"""


@pytest.fixture
def cluster(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY.format(mode="active"))
    with fleet_up(tmp_path, "--config", str(topology)) as up:
        yield up


def plans_of(cluster):
    return cluster.runtime_folder() / "plans"


def ready(cluster):
    return json.loads((plans_of(cluster) / "report.json").read_text())["pools"]["decode"]["ready"]


def decode_processes(cluster):
    return [number for number in range(8) if cluster.pid_of(f"decode-{number}")]


async def client_load(cluster, stopped):
    """Send requests one after the other until told to stop; return how many were answered."""
    answered = 0
    async with AsyncClient(cluster.grpc) as client:
        while not stopped.is_set():
            prompt = [random.randrange(5, 4000) for _ in range(50)]
            result = await client.complete(prompt, max_tokens=30, ignore_eos=True)
            assert len(result.token_ids) == 30
            answered += 1
    return answered


async def test_load_grows_and_shrinks_real_processes(cluster):
    stopped = asyncio.Event()
    assert decode_processes(cluster) == [0]
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client_load(cluster, stopped)) for _ in range(9)]
        await until(lambda: ready(cluster) == 3, 60.0)
        grown = decode_processes(cluster)
        stopped.set()
    await until(lambda: ready(cluster) == 1, 60.0)
    await until(lambda: len(decode_processes(cluster)) == 1, 60.0)

    status = json.loads(
        run_fleet("plan", "--json", "--planner", f"unix:{cluster.runtime_folder()}/planner.sock").stdout
    )
    assert len(grown) == 3
    assert sum(each.result() for each in clients) > 20
    assert {each["reason"] for each in status["plans"]} == {"load_up", "load_down"}


async def test_pool_pinned_by_a_person_keeps_its_size(cluster):
    pinned = run_fleet("scale", "decode=2", "--plans", str(plans_of(cluster)))
    assert pinned.returncode == 0, pinned.stderr
    stopped = asyncio.Event()
    planner = f"unix:{cluster.runtime_folder()}/planner.sock"

    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client_load(cluster, stopped)) for _ in range(12)]
        needed = 0.0
        while needed < 3:
            done = await asyncio.to_thread(run_fleet, "plan", "--json", "--planner", planner)
            status = json.loads(done.stdout)
            needed = status["numbers"].get("decode.needed", 0.0)
        stopped.set()

    assert [(each["wanted"], each["ready"]) for each in status["pools"]] == [(2, 2)]
    assert "fleet-scale has set it to 2" in status["pools"][0]["pinned"]
    assert all(each.result() for each in clients)

    released = run_fleet("scale", "--release", "decode", "--plans", str(plans_of(cluster)))
    assert released.returncode == 0, released.stderr

    await until(lambda: ready(cluster) == 1)  # nobody asks for anything any more


def test_release_refuses_unknown_pools_and_sizes(cluster):
    plans = str(plans_of(cluster))
    unknown = run_fleet("scale", "--release", "nobody", "--plans", plans)
    assert (unknown.returncode, unknown.stderr.strip()) == (1, "fleet: nobody: there is no such pool; there are decode")
    both = run_fleet("scale", "--release", "decode", "decode=2", "--plans", plans)
    assert both.returncode == 3
    assert "--release: cannot go with POOL=N" in both.stderr


async def test_planner_tells_several_pools_of_one_role_apart(tmp_path):
    """Both pools answer; only the one whose worker is busy grows."""
    topology = tmp_path / "topology.toml"
    pool = '[[pools]]\nrole = "both"\nmax_running = 8\n[pools.simulated.latency]\nstep_base_ms = 20.0\n'
    rule = 'rule = {kind = "load", requests_per_replica = 3, interval_seconds = 0.5, cool_down_seconds = 3}'
    goals = "goals = {ttft_seconds = 1.0, tpot_seconds = 0.05}"
    topology.write_text(f'{pool}{pool}[planner]\nmode = "active"\n{goals}\n{rule}\n')
    with fleet_up(tmp_path, "--config", str(topology)) as up:
        stopped = asyncio.Event()

        async def load():
            async with AsyncClient(up.grpc) as client:
                while not stopped.is_set():
                    await client.complete([7, 8, 9], max_tokens=30, ignore_eos=True, pin="both.2-0")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(load())
            await until(lambda: up.pid_of("both.2-1"), 60.0)
            stopped.set()
        assert not up.pid_of("both.1-1")
        assert up.pid_of("both.1-0")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("planner.pools.decode", "planner.pools.decoder", "planner.pools.decoder: is not a pool of this cluster"),
        ("most = 3", "most = 0", "planner.pools.decode.least: 1 is above `most`, 0"),
        ("start_seconds = 30", 'gpu = "h1000"', "planner.pools.decode.gpu: 'h1000' is not one of "),
        ("start_seconds = 30", "dollars_per_hour = -1", "planner.pools"),
        (
            "start_seconds = 30",
            'gpu = "h100"\n[planner.budget]\ngpus = 0',
            "planner.budget.gpus: 0 is below what the floors",
        ),
        ("interval_seconds = 0.5", "interval_seconds = 1e-9", "planner.rule.interval_seconds"),
        ("ttft_seconds = 1.0", "ttft_seconds = nan", "planner.goals.ttft_seconds"),
    ],
)
def test_wrong_planner_section_names_the_field(tmp_path, old, new, said):
    topology = tmp_path / "topology.toml"
    text = TOPOLOGY.format(mode="active")
    assert old in text
    topology.write_text(text.replace(old, new))

    done = run_fleet("up", "--engine", "simulated", "--http-port", "0", "--grpc-port", "0", "--config", str(topology))

    assert done.returncode == 3
    assert said in done.stderr
