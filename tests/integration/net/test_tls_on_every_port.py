"""Tests of TLS on every port that can speak it, by real processes and `openssl s_client`."""

import pytest

from tests.support.tls_cluster import a_tls_cluster

pytestmark = pytest.mark.integration

PORTS = (
    *("http", "grpc", "kserve", "health", "picker", "control", "peers"),
    *("worker-stream", "worker-control", "store-calls", "planner-control"),
    *("store-metrics", "planner-metrics", "prefill-metrics"),
)
GRPC_LIBRARY_CLOSES = b"unexpected eof while reading"
"""How openssl names that a server closed the connection without an alert, as gRPC's library does."""

NO_FORWARD_SECRECY = "AES128-GCM-SHA256:AES256-GCM-SHA384:AES128-SHA256:AES256-SHA256:AES128-SHA:AES256-SHA"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir):
    with a_tls_cluster(tmp_path_factory.mktemp("tls"), model_dir) as cluster:
        assert set(PORTS) == set(cluster.ports)
        yield cluster


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(("version", "told"), [("-tls1_2", b"TLSv1.2"), ("-tls1_3", b"TLSv1.3")])
def test_port_accepts_modern_tls(cluster, port, version, told):
    done = cluster.shake_hands(port, version)

    assert b"Verify return code: 0 (ok)" in done.stdout, done.stderr
    assert told in done.stdout
    assert b"-old" in done.stdout


@pytest.mark.parametrize("port", PORTS)
def test_port_refuses_tls_1_1(cluster, port):
    done = cluster.shake_hands(port, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")

    assert b"alert protocol version" in done.stderr or GRPC_LIBRARY_CLOSES in done.stderr, done.stderr
    assert b"Cipher is (NONE)" in done.stdout


@pytest.mark.parametrize("port", PORTS)
def test_port_refuses_ciphers_without_forward_secrecy(cluster, port):
    done = cluster.shake_hands(port, "-tls1_2", "-cipher", NO_FORWARD_SECRECY)

    assert b"alert handshake failure" in done.stderr or GRPC_LIBRARY_CLOSES in done.stderr, done.stderr
    assert b"Cipher is (NONE)" in done.stdout


@pytest.mark.parametrize("port", PORTS)
def test_port_between_processes_asks_for_a_certificate(cluster, port):
    """With TLS 1.2 the refusal is a part of the handshake."""
    shown = cluster.shake_hands(port, "-tls1_2")
    without = cluster.shake_hands(port, "-tls1_2", client={})
    stranger = cluster.shake_hands(port, "-tls1_2", client=cluster.second_client)

    assert shown.returncode == 0, shown.stderr
    for done in (without, stranger):
        assert (done.returncode == 0) == (port in cluster.plain), done.stderr
