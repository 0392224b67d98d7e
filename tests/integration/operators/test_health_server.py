"""Health server of the operator and the planner: its TLS, and the renewal of its certificate."""

import ssl
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra `kubernetes` is not installed")

import httpx
import msgspec
from prometheus_client import CollectorRegistry

from fleet.net.certificate_watch import metrics_port_certificates
from kvstore.security.metrics_access import OPEN_METRICS, MetricsTls
from operators.health_server import open_health_server
from operators.planner.settings import KubePlannerSettings
from operators.settings import OperatorSettings
from tests.support.certificates import Authority
from tests.support.waiting import until_answered

pytestmark = pytest.mark.integration


def trusting(authority):
    return ssl.create_default_context(cafile=authority.file)


async def status(address, authority):
    """Return the status of /readyz over TLS; None if the certificate is not one of this authority."""
    async with httpx.AsyncClient(verify=trusting(authority), trust_env=False) as client:
        try:
            return (await client.get(f"https://{address}/readyz")).status_code
        except httpx.ConnectError:
            return None


async def test_renewed_certificate_is_used_for_new_connections(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first, second = Authority(tmp_path / "one", "first"), Authority(tmp_path / "two", "second")
    named, renewed = first.issue("operator"), second.issue("operator")
    files = metrics_port_certificates(MetricsTls(**named))
    async with open_health_server("127.0.0.1", 0, list, list, CollectorRegistry(), OPEN_METRICS, files) as address:
        assert [await status(address, each) for each in (first, second)] == [200, None]

        for field in ("key", "certificate"):
            Path(renewed[field]).replace(named[field])

        async def is_renewed():
            return await status(address, second) == 200

        await until_answered(is_renewed)
        assert await status(address, first) is None
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://{address}/healthz")


@pytest.mark.parametrize("kind", [OperatorSettings, KubePlannerSettings])
def test_probes_forbid_certificates_of_scrapers(kind):
    tls = {"certificate": "c", "key": "k", "client_authority": "a"}
    images = {"router": "r", "worker_cpu": "c", "worker_cuda": "d", "worker_rocm": "m"}
    told = {"identity": "pod", "metrics_tls": tls} | ({"images": images} if kind is OperatorSettings else {})
    with pytest.raises(msgspec.ValidationError, match=r"^metrics_tls\.client_authority: probes of Kubernetes"):
        msgspec.convert(told, kind)
