"""Tests of a running cluster whose certificates, keys and authority are renewed while it serves."""

import asyncio
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.client import AsyncClient, Client, ClientTls
from fleet.client.errors import Unavailable
from operators.chart.metric_catalogue import PLANNER, STORE, WORKER
from tests.support.metric_pages import differences
from tests.support.tls_cluster import a_tls_cluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

PROMPT = "once upon a time there was a block of keys and values that went from a prefill worker to a decode worker"
ROUTER_SECTIONS = {"tls", "control_credentials", "worker_credentials", "replicas_credentials", "store_credentials"}
SECTIONS = {
    "store-metrics": {"credentials", "metrics_tls"},
    "planner-metrics": {"control_credentials", "source.credentials", "metrics_tls"},
    "prefill-metrics": {"credentials", "registry_credentials", "store_credentials", "metrics_tls"},
    "health": ROUTER_SECTIONS,
}
"""The sections of settings with certificates, by the port that exports their metrics."""


@pytest.fixture
def cluster(tmp_path, model_dir):
    with a_tls_cluster(tmp_path, model_dir) as cluster:
        yield cluster


class Load:
    """Clients that ask without a pause, each time over a new connection.

    Attributes:
        answered: Number of complete answers.
        failures: What went wrong.
    """

    def __init__(self, cluster):
        self.answered = 0
        self.failures = []
        self._cluster = cluster
        self._numbers = count()
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(4)

    def __enter__(self):
        for ask in (self._http, self._http, self._grpc, self._grpc):
            self._threads.submit(self._ask_on, ask)
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._threads.shutdown()

    def goes_on(self):
        """Wait until some more requests have been answered."""
        before = self.answered
        eventually(lambda: self.failures or self.answered >= before + 12, 120)

    def _ask_on(self, ask):
        while not self._stop.is_set():
            try:
                tokens = ask(f"{next(self._numbers)} {PROMPT}")
            except Exception as error:  # noqa: BLE001 - the test shows it
                self.failures.append(repr(error))
            else:
                if tokens != 24:
                    self.failures.append(f"{tokens} tokens")
                self.answered += 1

    def _http(self, prompt):
        context = ssl.create_default_context(cafile=str(self._cluster.authority))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        with httpx.Client(verify=context, timeout=60) as client:
            answer = client.post(f"https://{self._cluster.http}/v1/completions", json=body)
        return answer.raise_for_status().json()["usage"]["completion_tokens"]

    def _grpc(self, prompt):
        with Client(self._cluster.grpc, tls=ClientTls(authority=str(self._cluster.authority))) as client:
            return client.complete(prompt, max_tokens=24, ignore_eos=True, timeout_seconds=60).usage.completion_tokens


def metrics(cluster, port):
    context = ssl.create_default_context(cafile=str(cluster.authority))
    return httpx.get(f"https://{cluster.ports[port][0]}/metrics", verify=context, timeout=60).raise_for_status().text


def lines(page, name):
    return "\n".join(line for line in page.splitlines() if line.startswith(name))


def samples(page, name):
    return {
        sample.labels["setting"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def ports_with_old_certificates(cluster):
    return {port: cluster.name_at(port) for port in cluster.ports if not cluster.name_at(port).endswith("-new")}


def accepted(cluster, client):
    """Return the ports that accept a client's certificate; with TLS 1.2 a refusal is a part of the handshake."""
    return {port for port in cluster.ports if not cluster.shake_hands(port, "-tls1_2", client=client).returncode}


def test_all_certificates_are_renewed_without_a_failed_request(cluster):
    """The new certificates are of a new authority, as when the old one ends: trust both, renew, then trust the new one only."""
    with Load(cluster) as load:
        load.goes_on()
        cluster.trust(cluster.first, cluster.second)
        eventually(lambda: accepted(cluster, cluster.second_client) == set(cluster.ports), 120)
        load.goes_on()
        cluster.renew("new", cluster.second)
        eventually(lambda: not ports_with_old_certificates(cluster), 120)
        load.goes_on()
        cluster.trust(cluster.second)
        eventually(lambda: accepted(cluster, cluster.client) == cluster.plain, 120)
        load.goes_on()
        cluster.restart_peer()  # its connections to all others begin with the new authority
        eventually(
            lambda: 'worker="prefill"} 2.0' in lines(metrics(cluster, "prefill-metrics"), "fleet_worker_routers")
        )
        load.goes_on()

    assert load.failures == []
    assert load.answered >= 48
    assert [part for part, process in cluster.processes.items() if process.poll() is not None] == []
    blocks = metrics(cluster, "health")
    moved = [
        line for line in blocks.splitlines() if line.startswith("fleet_kv_blocks_total") and 'source="store"' in line
    ]
    assert any(not line.endswith(" 0.0") for line in moved), "the load went through the store"


async def opened(address, tls):
    return AsyncClient(address, tls=tls)


def test_open_clients_follow_a_change_of_the_authority(cluster):
    """The router is started anew, so that the clients have to connect to it again."""
    tls = ClientTls(authority=str(cluster.authority))
    options = {"max_tokens": 4, "ignore_eos": True, "timeout_seconds": 60}
    with asyncio.Runner() as runner, Client(cluster.peer["grpc"], tls=tls) as client:
        aio_client = runner.run(opened(cluster.peer["grpc"], tls))

        def answered():
            found = [client.complete(PROMPT, **options), runner.run(aio_client.complete(PROMPT, **options))]
            return [each.usage.completion_tokens for each in found] == [4, 4]

        def answered_if_served():
            with suppress(Unavailable):  # the workers have not reached the new router yet
                return answered()

        assert answered()
        cluster.trust(cluster.first, cluster.second)
        eventually(lambda: accepted(cluster, cluster.second_client) == set(cluster.ports), 120)
        cluster.renew("new", cluster.second)
        eventually(lambda: not ports_with_old_certificates(cluster), 120)
        cluster.trust(cluster.second)
        cluster.restart_peer()
        eventually(answered_if_served)
        runner.run(aio_client.close())


def test_files_that_cannot_be_used_leave_the_old_certificates(cluster):
    ended = {part: cluster.first.issue(f"{part}-ended", hours=(-2, -1)) for part in cluster.processes}
    good = {}
    for part, issued in ended.items():
        for field, path in issued.items():
            served = Path(cluster.own(part)[field])
            good[served] = served.read_text()
            served.write_text(Path(path).read_text())

    def refused(expected):
        return all(
            samples(metrics(cluster, port), "fleet_tls_renewal_refused") == dict.fromkeys(sections, expected)
            for port, sections in SECTIONS.items()
        )

    eventually(lambda: refused(1.0), 120)
    assert {cluster.name_at(port).rpartition("-")[2] for port in cluster.ports} == {"old"}
    with Client(cluster.grpc, tls=ClientTls(authority=str(cluster.authority))) as client:
        assert client.complete(PROMPT, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    for part in ("router", "prefill", "store", "planner"):
        assert "renewed certificate cannot be used, the old one stays" in cluster.log(part)
        assert "and not now" in cluster.log(part)

    for served, content in good.items():
        served.write_text(content)
    eventually(lambda: refused(0.0), 120)


def test_every_process_exports_the_ends_of_its_certificates(cluster):
    in_a_month = datetime.now(UTC).timestamp() + 30 * 24 * 3600
    for port, sections in SECTIONS.items():
        ends = samples(metrics(cluster, port), "fleet_tls_certificate_end_timestamp_seconds")
        assert set(ends) == sections
        assert all(in_a_month < end < 3 * in_a_month for end in ends.values())
    for port, definitions in (("prefill-metrics", WORKER), ("store-metrics", STORE), ("planner-metrics", PLANNER)):
        page = metrics(cluster, port)
        assert differences(page, definitions) == []
        assert "fleet_tls_certificate_end_timestamp_seconds" in page
    assert 'fleet_worker_routers{model="tiny",role="prefill",worker="prefill"} 2.0' in metrics(
        cluster, "prefill-metrics"
    )
