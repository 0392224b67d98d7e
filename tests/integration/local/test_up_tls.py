"""Tests of `fleet up --tls` with the clients that users have: OpenAI's, Fleet's own, gRPC's, and openssl."""

import asyncio
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from fleet.client import AsyncClient, Client, ClientTls, Unavailable
from fleet.core.errors import ConfigurationRefused
from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.servers.severable_proxy import SeverableProxy

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    with fleet_up(tmp_path_factory.mktemp("up"), "--tls", "--kserve-port", "0") as up:
        yield up


@pytest.fixture
def tls(up):
    return ClientTls(authority=up.endpoints["ca"])


def test_openai_client_streams_over_https(up):
    http = httpx.Client(verify=ssl.create_default_context(cafile=up.endpoints["ca"]))
    with openai.OpenAI(
        base_url=f"{up.endpoints['http']}/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        stream = client.completions.create(model="tiny", prompt="once", max_tokens=8, stream=True)
        texts = [chunk.choices[0].text for chunk in stream if chunk.choices]

    assert up.endpoints["http"].startswith("https://")
    assert "".join(texts)


def test_curl_with_the_authority_gets_models_and_an_answer(up):
    def curl(*arguments):
        command = ["curl", "--silent", "--show-error", "--fail", "--max-time", "60", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    trusted = ("--cacert", up.endpoints["ca"])
    models = curl(*trusted, f"{up.endpoints['http']}/v1/models")
    body = json.dumps({"model": "tiny", "prompt": "once", "max_tokens": 4, "ignore_eos": True})
    answered = curl(
        *trusted, "-H", "content-type: application/json", "-d", body, f"{up.endpoints['http']}/v1/completions"
    )
    unknown = curl(f"{up.endpoints['http']}/v1/models")

    assert [each["id"] for each in json.loads(models.stdout)["data"]] == ["tiny"], models.stderr
    assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 4, answered.stderr
    assert unknown.returncode == 60, "curl's status for a certificate of an unknown authority"


async def test_both_grpc_clients_get_equal_answers(up, tls):
    with Client(up.grpc, tls=tls) as client:
        answer = client.complete("once upon a time", max_tokens=8, temperature=0)
    async with AsyncClient(up.grpc, tls=tls) as client:
        again = await client.complete("once upon a time", max_tokens=8, temperature=0)

    assert answer.usage.completion_tokens == 8
    assert again.text == answer.text


def test_kserve_port_answers_over_tls(up):
    authority = grpc.ssl_channel_credentials(Path(up.endpoints["ca"]).read_bytes())
    with grpc.secure_channel(up.endpoints["kserve"], authority) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)

    assert live == b"\x08\x01", "the message ServerLiveResponse with live = true"


def test_client_without_the_authority_gets_no_answer(up):
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{up.endpoints['http']}/health", timeout=60)
    with Client(up.grpc, tls=ClientTls()) as client, pytest.raises(Unavailable):
        client.models()


async def test_client_without_tls_is_told_that_the_port_speaks_it(up):
    told = (
        rf"^{up.grpc} speaks TLS, and this client does not: give it tls=ClientTls\(authority=FILE\) \(.*Socket closed"
    )
    with Client(up.grpc) as client:
        for call in (client.models, lambda: client.complete("once")):
            with pytest.raises(Unavailable, match=told):
                call()
    async with AsyncClient(up.grpc) as client:
        for call in (client.models, lambda: client.complete("once")):
            with pytest.raises(Unavailable, match=told):
                await call()


async def test_generate_without_tls_names_the_option(up):
    proxy = SeverableProxy(int(up.grpc.rpartition(":")[2]))  # no run of this machine has its address
    await proxy.open()
    address = f"127.0.0.1:{proxy.port}"
    refused = await asyncio.to_thread(run_fleet, "generate", "--address", address, "once upon", "--max-tokens", "4")
    await proxy.close()
    assert refused.returncode == 1
    assert f"{address} speaks TLS, and this client does not: set --ca, or --tls" in refused.stderr


def test_generate_finds_the_authority_of_a_local_cluster(up):
    answered = run_fleet("generate", "--address", up.grpc, "once upon", "--max-tokens", "4")
    named = run_fleet("generate", "--address", up.grpc, "--ca", up.endpoints["ca"], "once upon", "--max-tokens", "4")
    wrong = run_fleet("generate", "--address", up.grpc, "--tls", "once upon", "--max-tokens", "4")

    assert (answered.returncode, named.returncode) == (0, 0), answered.stderr + named.stderr
    assert wrong.returncode == 1
    assert f"the certificate of {up.grpc} is not signed by an authority that gRPC knows; --ca names" in wrong.stderr


def test_private_key_is_readable_by_its_user_only(up):
    folder = Path(up.endpoints["ca"]).parent
    assert (folder / "router.key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_openssl_agrees_on_tls_1_3_and_verifies_the_name(up, port):
    address = up.endpoints[port].removeprefix("https://")
    command = ["openssl", "s_client", "-connect", address, "-CAfile", up.endpoints["ca"], "-verify_return_error"]
    told = subprocess.run(
        [*command, "-verify_ip", "127.0.0.1", "-alpn", "h2,http/1.1"],
        input=b"",
        capture_output=True,
        timeout=60,
        check=True,
    ).stdout.decode()

    assert "TLSv1.3" in told
    assert "Verify return code: 0 (ok)" in told
    assert f"ALPN protocol: {'h2' if port == 'grpc' else 'http/1.1'}" in told
    old = subprocess.run([*command, "-tls1_1"], input=b"", capture_output=True, timeout=60, check=False)
    assert old.returncode != 0


def test_api_key_does_not_leave_the_host_in_the_clear():
    with pytest.raises(ConfigurationRefused, match=r"api_key: would cross the network to 192\.0\.2\.1:1 in the clear"):
        Client("192.0.2.1:1", api_key="key")
    Client("127.0.0.1:1", api_key="key").close()
    Client("192.0.2.1:1", api_key="key", insecure=True).close()
    Client("192.0.2.1:1", api_key="key", tls=ClientTls()).close()

    refused = run_fleet("generate", "--address", "192.0.2.1:1", "--api-key", "key", "once")
    assert refused.returncode == 3
    assert "api_key: would cross the network" in refused.stderr


def test_unreadable_authority_is_named():
    with pytest.raises(ConfigurationRefused, match=r"tls\.authority: /none\.pem cannot be read"):
        Client("127.0.0.1:1", tls=ClientTls(authority="/none.pem"))
