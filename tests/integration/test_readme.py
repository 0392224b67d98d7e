"""The samples of the README run as they stand, against a cluster on free ports."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from fleet.config import Topology
from kvstore.settings import StoreSettings
from tests.integration.test_up_simulated import fleet_up
from workers.settings import WorkerSettings

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
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
