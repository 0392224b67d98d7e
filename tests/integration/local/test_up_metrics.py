"""Tests of the metrics of all processes of `fleet up`: a real Prometheus scrapes them over HTTPS, with a key."""

import hashlib
import shutil
import ssl
import subprocess

import httpx
import pytest

from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.servers.processes import free_ports
from tests.support.servers.prometheus import a_prometheus_server
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

KEY = "a key of the scraper"
TOPOLOGY = """
cluster.most_workers = 4
metrics_access.key_sha256 = ["{digest}"]
router.metrics_access.key_sha256 = ["{digest}"]
store.metrics_listen = "127.0.0.1:{store}"

[[pools]]
role = "prefill"
metrics_listen = "127.0.0.1:{prefill}"

[[pools]]
role = "decode"
replicas = 2
metrics_listen = "127.0.0.1:{decode}"
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    store, prefill, *_ = ports = free_ports(9)
    decode = ports[5:]
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path = folder / "topology.toml"
    path.write_text(TOPOLOGY.format(digest=digest, store=store, prefill=prefill, decode=decode[0]))
    with fleet_up(folder, "--tls", "--config", str(path)) as running:
        running.metrics = {
            "router": running.endpoints["http"].removeprefix("https://"),
            "store": f"127.0.0.1:{store}",
            "prefill-0": f"127.0.0.1:{prefill}",
            **{f"decode-{number}": f"127.0.0.1:{decode[0] + number}" for number in range(3)},
        }
        yield running


def scraped(up, process, headers=None):
    trusted = ssl.create_default_context(cafile=up.endpoints["ca"])
    return httpx.get(f"https://{up.metrics[process]}/metrics", headers=headers, verify=trusted, timeout=60)


def test_prometheus_scrapes_every_process_of_the_cluster(up):
    started = [name for name in up.metrics if name != "decode-2"]
    scrape = {
        "scheme": "https",
        "tls_config": {"ca_file": up.endpoints["ca"]},
        "authorization": {"credentials": KEY},
    }
    with a_prometheus_server([up.metrics[name] for name in up.metrics], scrape=scrape) as server:
        expected = {address: "0" if name == "decode-2" else "1" for name, address in up.metrics.items()}
        eventually(lambda: server.query("up") == expected, otherwise=lambda: server.query("up"))
        series = {
            "fleet_worker_phase": {up.metrics[name] for name in started if name not in ("router", "store")},
            "kvstore_pinned_blocks": {up.metrics["store"]},
            "fleet_worker_running": {up.metrics["router"]},
        }
        # The server leaves out a process that it could not scrape in time just before.
        for name, sources in series.items():

            def found(name=name):
                return set(server.query(f"sum by (instance) ({name})"))

            eventually(lambda found=found, sources=sources: found() == sources, otherwise=found)

        scaled = run_fleet("scale", "decode=3", "--address", up.grpc)
        assert scaled.returncode == 0, scaled.stderr
        eventually(lambda: server.query("up")[up.metrics["decode-2"]] == "1", otherwise=lambda: server.query("up"))


@pytest.mark.parametrize("process", ["router", "store", "prefill-0", "decode-1"])
def test_promtool_has_no_complaint_about_a_page(up, process):
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    page = scraped(up, process, {"Authorization": f"Bearer {KEY}"})
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page.text, capture_output=True, text=True, timeout=60, check=False
    )
    assert page.status_code == 200
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert scraped(up, process).status_code == 401
