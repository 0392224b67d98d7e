"""Tests of access to the control port: which callers are served, and how worker names are protected."""

import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleet.cli.console.exits import CONFIGURATION_REFUSED, REPLACED
from fleet.cli.main import run
from fleet.client import AsyncClient, Client, FleetError, Unauthenticated, Unavailable
from fleet.net.control.access import load_control_access
from fleet.net.control.address import control_folder, control_socket, find_control_socket, private_folder
from fleet.v1 import control_pb2 as control
from fleet.v1 import control_pb2_grpc, selection_pb2_grpc, worker_pb2, worker_pb2_grpc
from fleet.v1 import selection_pb2 as selection
from kvstore.net.addresses import unix_path
from kvstore.net.socket_guard import MAX_CONNECTIONS
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority
from tests.support.fleet_processes import FLEET, fleet_up, run_fleet, start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import a_free_port
from tests.support.servers.silent_connections import IdleHttp2Connections
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

KEY = "open sesame"
PLAIN_PEER, NO_CERTIFICATE = "WRONG_VERSION_NUMBER", "PEER_DID_NOT_RETURN_A_CERTIFICATE"  # in lines of the gRPC library
EXPIRED, OTHER_AUTHORITY = "certificate has expired", "unable to get local issuer certificate"
FORGED = control.RegisterRequest(worker_id="decode-0", incarnation="x", address="127.0.0.1:9")


def calls(channel):
    """Return every call of the control port by name."""
    registry = control_pb2_grpc.RegistryStub(channel)
    cluster = control_pb2_grpc.ClusterStub(channel)
    leases = selection_pb2_grpc.SelectionStub(channel)
    return {
        "Register": lambda: registry.Register(FORGED, timeout=20),
        "Deregister": lambda: registry.Deregister(control.DeregisterRequest(worker_id="decode-0"), timeout=20),
        "Status": lambda: cluster.Status(control.StatusRequest(), timeout=20),
        "Explain": lambda: cluster.Explain(control.ExplainRequest(request_id="r"), timeout=20),
        "Tune": lambda: cluster.Tune(control.TuneRequest(max_queued=0), timeout=20),
        "Select": lambda: leases.Select(selection.SelectRequest(tokens=bytes(400), lease_ms=30_000), timeout=20),
        "Report": lambda: leases.Report(selection.ReportRequest(lease_id="l"), timeout=20),
        "Release": lambda: leases.Release(selection.ReleaseRequest(lease_id="l"), timeout=20),
    }


def code_of(call):
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def codes(address, credentials=None):
    """Return the status of each call with these credentials."""
    with load_control_access("test", credentials or Credentials()).channel(address) as channel:
        return {name: code_of(call) for name, call in calls(channel).items()}


def worker_codes(address, credentials=None):
    """Return the status of each call of a worker's control port with these credentials."""
    with load_control_access("test", credentials or Credentials()).channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        return {
            "Describe": code_of(lambda: stub.Describe(worker_pb2.DescribeRequest(), timeout=20)),
            "Drain": code_of(lambda: stub.Drain(worker_pb2.DrainRequest(deadline_ms=100), timeout=20)),
        }


NAMES = ("Register", "Deregister", "Status", "Explain", "Tune", "Select", "Report", "Release")


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("the secret of this cluster\n")
    return path


@pytest.fixture
def short_folder():
    with a_short_folder() as folder:
        yield folder


@contextmanager
def a_process(part, settings, folder, name=""):
    """Run one service; its log is in the folder."""
    file = folder / f"{name or part}.json"
    log = file.with_suffix(".log")
    with log.open("w") as output:
        process, endpoints = start_service(part, settings, file, stdout=output, stderr=output)
    try:
        assert endpoints, log.read_text()
        process.log = log
        yield process, endpoints
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def a_router(model_dir, **settings):
    return {
        "http_listen": "127.0.0.1:0",
        "grpc_listen": "127.0.0.1:0",
        "models": {"tiny": str(model_dir)},
        "heartbeat_timeout_seconds": 0.5,
        "connect_timeout_seconds": 0.5,
        **settings,
    }


def a_worker(folder, control_address, socket="w0", **settings):
    return {
        "worker_id": "w0",
        "engine": "simulated",
        "model": "tiny",
        "listen": f"unix:{folder / socket}.sock",
        "control_listen": f"unix:{folder / socket}-control.sock",
        "registry": control_address,
        "heartbeat_ms": 100,
        "load_interval_ms": 50,
        "simulated": {"speedup": 1000},
        **settings,
    }


@contextmanager
def a_router_and_a_worker(folder, model_dir, **worker):
    """Yield the router's addresses, a client, and the process of the serving worker w0."""
    with (
        a_process("router", a_router(model_dir), folder) as (_, endpoints),
        Client(endpoints["grpc"]) as client,
        a_process("worker", a_worker(folder, endpoints["control"], **worker), folder, "first") as (first, _),
    ):
        eventually(lambda: states(client) == {"w0": "serving"})
        yield endpoints, client, first


def states(client):
    return {worker.worker_id: worker.state for pool in client.status().pools for worker in pool.workers}


def is_ready(address):
    with grpc.insecure_channel(address) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def test_client_port_offers_no_control_calls(tmp_path):
    """Try forged registrations, leases of ten minutes and empty thresholds, with API keys configured."""
    topology = tmp_path / "topology.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    topology.write_text(f"[router.tenants.acme]\napi_key_sha256 = ['{digest}']\n")
    with fleet_up(tmp_path, "--config", str(topology)) as up, Client(up.grpc, api_key=KEY) as client:
        before = client.complete("Hello", max_tokens=4, temperature=0, timeout_seconds=30)
        thresholds = client.tune()
        for _ in range(4):
            assert codes(up.grpc) == dict.fromkeys(NAMES, grpc.StatusCode.UNIMPLEMENTED)

        assert client.tune() == thresholds
        assert client.complete("Hello", max_tokens=4, temperature=0, timeout_seconds=30).token_ids == before.token_ids
        assert states(client) == {"prefill-0": "serving", "decode-0": "serving"}
        assert up.endpoints["control"] == f"unix:{up.runtime_folder()}/control.sock"
        assert stat.S_IMODE(Path(unix_path(up.endpoints["control"])).stat().st_mode) == 0o600
        assert stat.S_IMODE(up.runtime_folder().stat().st_mode) == 0o700


def test_forged_registration_cannot_take_a_live_name(tmp_path):
    """Check that even a permitted caller, here on the user's own socket, cannot take a registered name."""
    with fleet_up(tmp_path) as up, Client(up.grpc) as client:
        told = codes(up.endpoints["control"])

        assert told["Register"] is grpc.StatusCode.ALREADY_EXISTS
        client.tune(max_queued=100)
        assert client.complete("Hello", max_tokens=4, timeout_seconds=30).finish
        assert states(client)["decode-0"] == "serving"


def test_leases_of_one_caller_do_not_block_tenants(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text("[[pools]]\nrole = 'both'\nmax_running = 8\n")
    with fleet_up(tmp_path, "--config", str(topology)) as up, Client(up.grpc) as client:
        with grpc.insecure_channel(up.endpoints["control"]) as channel:
            stub = selection_pb2_grpc.SelectionStub(channel)
            told = [
                code_of(lambda ms=ms: stub.Select(selection.SelectRequest(tokens=bytes(400), lease_ms=ms), timeout=20))
                for ms in (600_000, 60_000)
                for _ in range(32)
            ]

        assert told[:32] == [grpc.StatusCode.INVALID_ARGUMENT] * 32
        assert told[32:] == [grpc.StatusCode.OK] * 8 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 24
        assert client.complete("Hello", max_tokens=4, timeout_seconds=20).finish


def test_tcp_control_port_requires_a_proof(tmp_path, model_dir, secret):
    credentials = {"secret_file": str(secret)}
    wrong = tmp_path / "wrong"
    wrong.write_text("the secret of another cluster")
    router = a_router(model_dir, control_listen="127.0.0.1:0", control_credentials=credentials)
    with a_process("router", router, tmp_path) as (_, endpoints):
        address = endpoints["control"]
        refused = dict.fromkeys(NAMES, grpc.StatusCode.UNAUTHENTICATED)
        assert codes(address) == codes(address, Credentials(secret_file=str(wrong))) == refused
        assert not is_ready(address), "health asks for no proof, and nobody serves yet"

        ours = Credentials(secret_file=str(secret))
        with Client(endpoints["grpc"], control=address, control_credentials=ours) as client:
            assert states(client) == {}, "nothing was registered"
            assert client.tune()["max_queued"] == 1024
            worker = a_worker(tmp_path, address, registry_credentials=credentials)
            with a_process("worker", worker, tmp_path):
                eventually(lambda: states(client) == {"w0": "serving"})
                assert client.complete("Hello", max_tokens=4, timeout_seconds=30).finish
            stranger = a_worker(tmp_path, address, "stranger", worker_id="stranger")
            with a_process("worker", stranger, tmp_path, "stranger") as (process, _):
                eventually(lambda: "set registry_credentials" in process.log.read_text())
                assert "registration refused" in process.log.read_text()
                assert "registry unreachable" not in process.log.read_text()
                assert not is_ready(stranger["control_listen"])
                assert "stranger" not in states(client)
        with Client(endpoints["grpc"], control=address) as client, pytest.raises(Unauthenticated):
            client.status()
        command = ("status", "--control-address", address)
        told = run_fleet(*command)
        assert (told.returncode, "--control-secret-file" in told.stderr) == (1, True)
        assert run_fleet(*command, "--control-secret-file", str(secret)).returncode == 0
        told = run_fleet(*command, "--control-authority", Authority(tmp_path, "ours").file)
        assert told.stderr.endswith(  # gRPC's library may have logged a line before
            f"fleet: {address} does not speak TLS, and this client does: --control-authority is set\n"
        )
        told = run_fleet("generate", "hi", "--address", address)
        assert f"fleet: {address}: that is an address of another part of the cluster" in told.stderr
        assert "--address takes the clients' gRPC address of a router" in told.stderr


def test_idle_connections_to_control_ports_give_way(tmp_path, model_dir, secret):
    """Hold more connections than a port may have, at the router and at a worker; both serve their callers all the same."""
    credentials = {"secret_file": str(secret)}
    ours, count = Credentials(secret_file=str(secret)), MAX_CONNECTIONS + 100
    router = a_router(model_dir, control_listen="127.0.0.1:0", control_credentials=credentials)
    with a_process("router", router, tmp_path) as (_, endpoints):
        settings = a_worker(
            tmp_path, endpoints["control"], registry_credentials=credentials, control_listen="127.0.0.1:0"
        )
        with a_process("worker", settings, tmp_path) as (_, worker):
            for address, asked in ((endpoints["control"], codes), (worker["grpc"], worker_codes)):
                with IdleHttp2Connections.open(address, count) as idle:
                    assert eventually(lambda: idle.ended >= count - MAX_CONNECTIONS)
                    assert grpc.StatusCode.OK in asked(address, ours).values()


def test_tcp_control_port_accepts_certificates(tmp_path, model_dir):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    own = {"authority": ours.file, **ours.issue("router")}
    router = a_router(model_dir, control_listen="127.0.0.1:0", control_credentials=own)
    with a_process("router", router, tmp_path) as (_, endpoints):
        address = endpoints["control"]
        unreachable = dict.fromkeys(NAMES, grpc.StatusCode.UNAVAILABLE)
        forged = Credentials(authority=ours.file, **theirs.issue("forged"))
        assert (
            codes(address) == codes(address, Credentials(authority=ours.file)) == codes(address, forged) == unreachable
        )

        shown = {"authority": ours.file, **ours.issue("worker")}
        with (
            a_process("worker", a_worker(tmp_path, address, registry_credentials=shown), tmp_path),
            Client(endpoints["grpc"], control=address, control_credentials=Credentials(**shown)) as client,
        ):
            eventually(lambda: states(client) == {"w0": "serving"})


def test_tls_error_at_the_control_port_is_named(tmp_path, model_dir, capsys):
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    own = {"authority": ours.file, **ours.issue("router")}
    shown, expired = ours.issue("person"), ours.issue("late", hours=(-2, -1))
    router = a_router(model_dir, control_listen="127.0.0.1:0", control_credentials=own)
    with a_process("router", router, tmp_path) as (router_process, endpoints):
        address = endpoints["control"]

        def told(**credentials):
            options = [each for name, file in credentials.items() for each in (f"--control-{name}", file)]
            status = run(["status", "--control-address", address, *options])
            return status, capsys.readouterr().err

        assert told() == (1, f"fleet: {address} speaks TLS, and this client does not: set --control-authority\n")
        status, error = told(authority=ours.file)
        assert (status, "set --control-certificate and --control-key" in error) == (1, True)
        status, error = told(authority=theirs.file, **shown)
        assert (status, f"is not signed by the authority in {theirs.file}" in error) == (1, True)
        status, error = told(authority=ours.file, **expired)
        assert (status, "certificate has expired" in error) == (1, True), error
        assert told(authority=ours.file, **shown)[0] == 0
        for cause in (PLAIN_PEER, NO_CERTIFICATE, EXPIRED):
            eventually(lambda cause=cause: cause in router_process.log.read_text())

        worker = a_worker(tmp_path, address, registry_credentials={"authority": ours.file})
        with a_process("worker", worker, tmp_path) as (process, _):
            eventually(lambda: "set registry_credentials.certificate" in process.log.read_text())


def test_status_queries_a_store_with_a_secret(tmp_path, model_dir, secret):
    credentials = {"secret_file": str(secret)}
    node = {"store_id": "s0", "listen": ["127.0.0.1:0"], "capacity_bytes": 1 << 20, "credentials": credentials}
    with a_process("kvstore", node, tmp_path) as (_, store):
        router = a_router(model_dir, store=store["grpc"], store_credentials=credentials)
        with a_process("router", router, tmp_path) as (_, endpoints), Client(endpoints["grpc"]) as client:
            assert client.status().store.store_id == "s0"


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:50052"])
def test_tcp_control_port_without_credentials_is_rejected(tmp_path, model_dir, listen):
    file = tmp_path / "router.json"
    file.write_text(json.dumps(a_router(model_dir, control_listen=listen)))

    told = run_fleet("serve", "router", "--config", str(file))

    assert told.returncode == CONFIGURATION_REFUSED
    assert f"control_listen: whoever reaches {listen} could register workers" in told.stderr
    assert "control_credentials.secret_file" in told.stderr


def test_replicas_without_replicas_listen_are_rejected(tmp_path, model_dir):
    file = tmp_path / "router.json"
    file.write_text(json.dumps(a_router(model_dir, replicas=["127.0.0.1:9"])))

    told = run_fleet("serve", "router", "--config", str(file), timeout=60)

    assert told.returncode == CONFIGURATION_REFUSED
    assert "replicas: 127.0.0.1:9 could not reach this router, because replicas_listen is empty" in told.stderr


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
def test_worker_tcp_port_without_credentials_is_rejected(tmp_path, listen):
    file = tmp_path / "worker.json"
    file.write_text(json.dumps(a_worker(tmp_path, "", control_listen=listen)))

    told = run_fleet("serve", "worker", "--config", str(file))

    assert told.returncode == CONFIGURATION_REFUSED
    assert f"control_listen: any caller of {listen} could end the worker" in told.stderr
    assert "control_credentials.secret_file" in told.stderr


@pytest.mark.parametrize("field", ["control_credentials", "registry_credentials"])
def test_unknown_caller_cannot_drain_a_worker_over_tcp(short_folder, secret, field):
    credentials = {"secret_file": str(secret)}
    worker = a_worker(short_folder, "", control_listen="127.0.0.1:0", **{field: credentials})
    with a_process("worker", worker, short_folder) as (process, endpoints):
        address = endpoints["grpc"]

        refused = dict.fromkeys(("Describe", "Drain"), grpc.StatusCode.UNAUTHENTICATED)
        assert worker_codes(address) == refused
        eventually(lambda: is_ready(address))
        assert process.poll() is None

        ours = Credentials(secret_file=str(secret))
        assert worker_codes(address, ours) == dict.fromkeys(refused, grpc.StatusCode.OK)
        assert process.wait(30) == 0, "the worker has drained"


def test_worker_control_port_accepts_only_certificates(short_folder):
    ours, theirs = Authority(short_folder, "ours"), Authority(short_folder, "theirs")
    own = {"authority": ours.file, **ours.issue("worker")}
    settings = a_worker(short_folder, "", control_listen="127.0.0.1:0", control_credentials=own)
    with a_process("worker", settings, short_folder) as (process, endpoints):
        address = endpoints["grpc"]

        unreachable = dict.fromkeys(("Describe", "Drain"), grpc.StatusCode.UNAVAILABLE)
        forged = Credentials(authority=ours.file, **theirs.issue("forged"))
        assert worker_codes(address) == worker_codes(address, forged) == unreachable
        for cause in (PLAIN_PEER, OTHER_AUTHORITY):
            eventually(lambda cause=cause: cause in process.log.read_text())
        shown = Credentials(authority=ours.file, **ours.issue("operator"))
        assert worker_codes(address, shown) == dict.fromkeys(unreachable, grpc.StatusCode.OK)


def test_worker_control_socket_is_private_and_replaced(short_folder):
    settings = a_worker(short_folder, "")
    path = Path(unix_path(settings["control_listen"]))
    with a_process("worker", settings, short_folder) as (process, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        process.kill()
        process.wait(30)
    assert path.exists()
    with a_process("worker", settings, short_folder) as (process, _):
        told = worker_codes(settings["control_listen"])
        assert told == dict.fromkeys(told, grpc.StatusCode.OK)
        assert process.wait(30) == 0
    assert not path.exists()


def test_default_control_socket_is_private_and_discoverable(tmp_path, model_dir):
    with a_process("router", a_router(model_dir), tmp_path) as (_, endpoints):
        assert endpoints["control"] == control_socket(endpoints["grpc"])
        assert stat.S_IMODE(control_folder().stat().st_mode) == 0o700
        assert stat.S_IMODE(Path(unix_path(endpoints["control"])).stat().st_mode) == 0o600
        for address in (endpoints["grpc"], endpoints["grpc"].replace("127.0.0.1", "localhost")):
            assert run_fleet("status", "--address", address).returncode == 0


@pytest.mark.parametrize(("host", "is_this_machine"), [("127.0.0.1", True), ("127.0.0.2", True), ("192.0.2.1", False)])
def test_control_socket_is_found_only_for_this_machine(short_folder, monkeypatch, host, is_this_machine):
    """Ask for a router that listens at all addresses. 192.0.2.1 belongs to no machine (RFC 5737)."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    private_folder()
    address = control_socket("0.0.0.0:50051")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(unix_path(address))

        assert find_control_socket(f"{host}:50051") == (address if is_this_machine else None)


def test_dead_control_sockets_are_removed_at_the_next_start(tmp_path, model_dir):
    with a_process("router", a_router(model_dir), tmp_path, "alive") as (_, alive):
        with a_process("router", a_router(model_dir), tmp_path, "killed") as (process, killed):
            process.kill()
            process.wait(30)
        assert Path(unix_path(killed["control"])).exists()

        with a_process("router", a_router(model_dir), tmp_path, "next") as (_, following):
            left = [each for each in (alive, killed, following) if Path(unix_path(each["control"])).exists()]

        assert left == [alive, following]


@pytest.mark.parametrize("there", ["open to others", "a link", "a file"])
def test_public_control_folder_is_rejected(tmp_path, model_dir, short_folder, there):
    folder = short_folder / f"fleet-control-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if there == "a link":
        folder.symlink_to(elsewhere)
    elif there == "a file":
        folder.touch(mode=0o700)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    file = tmp_path / "router.json"
    file.write_text(json.dumps(a_router(model_dir)))

    told = subprocess.run(
        [*FLEET, "serve", "router", "--config", str(file)],
        env={**os.environ, "TMPDIR": str(short_folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert told.returncode == CONFIGURATION_REFUSED, told.stderr
    assert "is not a folder of this user alone" in told.stderr
    assert list(elsewhere.iterdir()) == []


def test_second_worker_of_one_name_is_rejected(tmp_path, model_dir):
    with a_router_and_a_worker(tmp_path, model_dir) as (endpoints, client, first):
        second = a_worker(tmp_path, endpoints["control"], "second", name_wait_seconds=1.0)
        with a_process("worker", second, tmp_path, "second") as (process, _):
            eventually(lambda: "worker id held by another process" in process.log.read_text())
            assert not is_ready(second["control_listen"])
            assert client.complete("Hello", max_tokens=4, timeout_seconds=30).finish
            assert process.wait(60) == REPLACED
            told = process.log.read_text().splitlines()[-1]
        assert (tmp_path / "router.log").read_text().count("registration rejected") == 1

        assert told.startswith("fleet: WorkerReplaced: worker_id: w0 is held by the process at ")
        assert "to which this router has a stream; every worker needs an id of its own" in told
        assert first.poll() is None
        assert client.complete("Hello", max_tokens=4, timeout_seconds=30).finish


def test_worker_with_other_weights_continues_no_answer(tmp_path, model_dir):
    """Use greedy streams, whose continuation by other weights would be a mixture of two models that nobody notices."""
    asked = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True, "timeout_seconds": 60.0}
    prompts = [list(range(100 + number, 180 + number)) for number in range(8)]
    with a_router_and_a_worker(tmp_path, model_dir, simulated={"speedup": 1}) as (endpoints, client, first):
        streams = [client.generate(prompt, **asked) for prompt in prompts]
        begun = [next(stream) for stream in streams]
        other = a_worker(
            tmp_path, endpoints["control"], "other", worker_id="w1", simulated={"seed": 7, "speedup": 1000}
        )
        with a_process("worker", other, tmp_path, "other"):
            eventually(lambda: states(client).get("w1") == "serving")
            first.kill()

            for stream in streams:
                with pytest.raises(Unavailable, match="no other worker has the weights that began the answer"):
                    list(stream)
            assert all(delta.token_ids for delta in begun)
            assert client.complete(prompts[0], **asked).finish, "new requests are served by the other worker"


def test_replaced_worker_ends_with_an_error(tmp_path, model_dir):
    with a_router_and_a_worker(tmp_path, model_dir) as (endpoints, client, first):
        first.send_signal(signal.SIGSTOP)
        second = a_worker(tmp_path, endpoints["control"], "second")
        with a_process("worker", second, tmp_path, "second"):
            eventually(lambda: is_ready(second["control_listen"]))

            first.send_signal(signal.SIGCONT)

            assert first.wait(60) == REPLACED
            told = first.log.read_text().splitlines()[-1]
            assert told.startswith("fleet: WorkerReplaced: w0 has been replaced: worker_id: w0 is held by ")
            assert client.complete("Hello", max_tokens=4, timeout_seconds=30).finish


def test_a_killed_worker_is_replaced_before_its_lease_ends(tmp_path, model_dir):
    """Use leases of nine seconds; the router notices at once that the old address does not answer."""
    with a_router_and_a_worker(tmp_path, model_dir) as (endpoints, _, first):
        first.kill()
        again = a_worker(tmp_path, endpoints["control"], "again")
        with a_process("worker", again, tmp_path, "again") as (second, _):
            eventually(lambda: is_ready(again["control_listen"]))
            assert "worker id held by another process" not in second.log.read_text()


async def test_client_without_a_control_address_says_so():
    nowhere = f"127.0.0.1:{a_free_port()}"
    async with AsyncClient(nowhere) as client:
        with pytest.raises(Unavailable, match="the control address of the router is not known"):
            await client.status()


def test_client_address_as_control_address_is_detected(tmp_path, model_dir):
    with (
        a_process("router", a_router(model_dir), tmp_path) as (_, endpoints),
        Client(endpoints["grpc"], control=endpoints["grpc"]) as client,
        pytest.raises(FleetError) as error,
    ):
        client.status()
    assert "that is an address for clients" in error.value.message
