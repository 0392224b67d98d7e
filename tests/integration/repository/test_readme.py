"""Tests of the samples in the README, which run unchanged against a cluster on free ports, and of the samples on other pages."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from fleet.local.settings import Topology
from fleet.planner.connectors.virtual import Intent, PlanReport
from fleet.planner.settings import EtcdTarget, FolderTarget, PlanConnectorSettings
from fleet.router.settings.router import RouterSettings
from kvstore.service.settings import StoreSettings
from tests.support.fleet_processes import fleet_up
from workers.settings import WorkerSettings

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with fleet_up(tmp_path_factory.mktemp("readme")) as up:
        yield up


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_samples_run_and_print_an_answer(cluster, number):
    code = blocks("python")[number]
    http = cluster.endpoints["http"].removeprefix("http://")
    code = code.replace("127.0.0.1:8000", http).replace("127.0.0.1:50051", cluster.grpc)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_toml_sample_is_a_topology():
    (sample,) = blocks("toml")

    msgspec.convert(tomllib.loads(sample), Topology)


def test_the_toml_sample_of_the_stores_page_is_a_node():
    sample, *others = blocks("toml", ROOT / "docs" / "kvstore.md")

    settings = msgspec.convert(tomllib.loads(sample), StoreSettings)
    worker, topology, ranks = (tomllib.loads(other) for other in others)
    assert msgspec.convert(worker, WorkerSettings).embedded_store is not None
    assert msgspec.convert(topology, Topology).store.place == "worker"
    assert msgspec.convert({**worker, **ranks}, WorkerSettings).vllm.extra_args == {"tensor_parallel_size": 2}

    assert [tier.__struct_config__.tag for tier in settings.tiers] == ["ssd", "peer", "redis"]


def test_the_toml_samples_of_the_routers_page_are_settings():
    first, tenants, replicas, directories, patience, control = blocks("toml", ROOT / "docs" / "router.md")

    settings = msgspec.convert(tomllib.loads(first) | tomllib.loads(tenants), RouterSettings)
    assert (len(settings.openai_workers), list(settings.tenants)) == (2, ["acme"])
    assert msgspec.convert(tomllib.loads(replicas), RouterSettings).replicas_credentials.secret_file
    for line in directories.splitlines():
        assert msgspec.convert(tomllib.loads(line), RouterSettings).discovery is not None
    assert msgspec.convert(tomllib.loads(patience), Topology).pools[0].watchdog.floor_seconds == 5
    assert msgspec.convert(tomllib.loads(control), RouterSettings).control_credentials.secret_file


def test_the_toml_sample_of_the_hardware_page_is_a_profile():
    (sample,) = blocks("toml", ROOT / "docs" / "hardware.md")

    assert msgspec.convert(tomllib.loads(sample), RouterSettings).profiles["decode"].gpu == "h100"


def test_scaling_page_samples_are_readable_by_connectors():
    page = ROOT / "docs" / "scaling.md"
    folder, etcd = (
        msgspec.convert(tomllib.loads(each), PlanConnectorSettings).connector for each in blocks("toml", page)
    )
    plan, report = (json.loads(each) for each in blocks("json", page))

    assert isinstance(folder, FolderTarget)
    assert isinstance(etcd, EtcdTarget)
    assert msgspec.to_builtins(msgspec.convert(plan, Intent)) == plan
    read = msgspec.to_builtins(msgspec.convert(report, PlanReport))
    assert {name: pool | report["pools"][name] for name, pool in read["pools"].items()} == read["pools"]
