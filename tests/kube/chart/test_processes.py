"""Commands of the rendered chart's pods as processes: router, probes, the chart's Helm test, etcd and Redis."""

import contextlib
import hashlib
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.kube.charts import Document, by_name, documents, helm_3_render, rendered
from tests.support.servers import etcd
from tests.support.servers.processes import RedisServer, ServerProcess, a_free_port
from tests.support.waiting import eventually

VALUES = {
    "routers": {
        "kserve": True,
        "controlSecret": "fleet-control",
        "settings": {"openai_workers": [{"worker_id": "gpu-0", "url": "http://127.0.0.1:9", "model": "llama"}]},
        "secrets": [
            {"setting": "tenants", "name": "fleet", "key": "tenants.json"},
            {"setting": "tenant_secret", "name": "fleet", "key": "tenant-secret"},
        ],
    }
}
PORTS = ("http_listen", "grpc_listen", "health_listen", "control_listen", "kserve_listen", "replicas_listen")
FLEET = [sys.executable, "-m", "fleet.cli.main"]


@pytest.fixture
def found():
    return by_name(documents(helm_3_render(VALUES)))


def only_container(workload: Document) -> Document:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture
def container(found) -> Document:
    return only_container(found["Deployment", "fleet-routers"])


@pytest.fixture
def mounted(found, tmp_path) -> Path:
    """Return the files that a pod would have under /etc/fleet."""
    tenants = {"alice": {"api_key_sha256": [hashlib.sha256(b"open sesame").hexdigest()]}}
    contents = {
        "settings/settings.json": found["ConfigMap", "fleet-routers"]["data"]["settings.json"],
        "secrets/0/tenants.json": json.dumps(tenants),
        "secrets/1/tenant-secret": "hush",
        "control/secret": "hush, as they all know",
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


@pytest.fixture
def endpoints(container, mounted):
    """Run a router by the command of its pod, but on free ports; return its endpoints."""
    free = [f"--set={port}=127.0.0.1:0" for port in PORTS]
    free += [f"--set={end}_credentials.secret_file={mounted}/control/secret" for end in ("control", "replicas")]
    words = [*container["command"][1:], *container["args"], *free]
    here = [
        word.replace("/etc/fleet", str(mounted))
        .replace("$(POD_NAME)", "fleet-routers-abc")
        .replace("$(POD_IP)", "127.0.0.1")
        for word in words
    ]
    with subprocess.Popen([*FLEET, *here], stdout=subprocess.PIPE, text=True) as router:
        try:
            yield json.loads(router.stdout.readline())
        finally:
            router.terminate()
            assert router.wait(60) == 0


def test_router_runs_by_the_command_of_its_pod(found, container, endpoints):
    assert {port["name"] for port in container["ports"]} == {*endpoints, "peers"}
    probes = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    with httpx.Client(base_url=f"http://{endpoints['http']}", trust_env=False, timeout=60) as client:
        codes = {
            probe: client.get(f"http://{endpoints[asked['port']]}{asked['path']}").status_code
            for probe, asked in probes.items()
        }
        # The process is alive, but does not serve yet, since its etcd is not there.
        assert codes == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}
        question = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}]}
        assert client.post("/v1/chat/completions", json=question).status_code == 401
        known = client.post("/v1/chat/completions", json=question, headers={"Authorization": "Bearer open sesame"})
        assert known.status_code == 503, known.text

    asked = found["Pod", "fleet-test"]["spec"]["containers"][0]["command"][1:]
    command = [word.replace("fleet-routers:8000", endpoints["http"]) for word in asked]
    subprocess.run([sys.executable, *command], timeout=30, check=True)


def test_routers_control_port_demands_the_mounted_secret(mounted, endpoints):
    def status(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*FLEET, "status", "--control-address", endpoints["control"], *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert "set the caller's secret" in status().stderr
    assert "router  requests" in status("--control-secret-file", str(mounted / "control" / "secret")).stdout


@contextlib.contextmanager
def a_tunnel(host: str, to: str) -> Iterator[dict[str, str]]:
    """Give the variables of a proxy that connects clients who ask for `host` to the address `to`, and nobody else."""

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked = self.rfile.readline().split()
            while self.rfile.readline().strip():
                pass
            if asked[:2] != [b"CONNECT", host.encode()]:
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            with socket.create_connection(to.rsplit(":", 1)) as server:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=relay, args=(server, self.connection))
                back.start()
                relay(self.connection, server)
                back.join()

    def relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{proxy.server_address[1]}"
            yield {"http_proxy": url, "grpc_proxy": url, "no_proxy": "", "no_grpc_proxy": ""}
        finally:
            proxy.shutdown()


def test_helm_test_sends_its_key_from_a_mounted_file(mounted, endpoints):
    values = VALUES | {"test": {"model": "llama", "apiKey": {"name": "fleet-test", "insecure": True}}}
    (asking,) = by_name(documents(helm_3_render(values)))["Pod", "fleet-test"]["spec"]["containers"]
    key = mounted / "api-key" / "key"
    key.parent.mkdir()
    words = [*asking["command"][1:], *asking["args"]]
    here = [word.replace("/etc/fleet", str(mounted)) for word in words]

    with a_tunnel("fleet-routers:50051", endpoints["grpc"]) as proxy:

        def complaint(*without: str) -> str:
            command = [*FLEET, *(word for word in here if word not in without), "--timeout", "5"]
            environment = os.environ | proxy
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=30, check=False
            ).stderr

        key.write_text("wrong")
        assert "the key of --api-key is not known" in complaint()
        key.write_text("open sesame\n")
        assert "'llama' is not served here" in complaint(), "the key is known; only the server behind is not there"
        assert "would cross the network to fleet-routers:50051" in complaint("--insecure")
        key.unlink()
        assert f"--api-key-file: {key}: No such file" in complaint()


def test_three_members_of_etcd_become_one_cluster(tmp_path):
    workload = by_name(rendered("everything"))["StatefulSet", "fleet-llm-etcd"]
    container = only_container(workload)
    service = workload["spec"]["serviceName"]
    names = [f"{service}-{at}" for at in range(workload["spec"]["replicas"])]
    places = {name: {port: a_free_port() for port in ("2379", "2380", "2381")} for name in names}

    def here(word: str, name: str) -> str:
        word = word.replace("$(POD_NAME)", name).replace("/data", str(tmp_path / name))
        for other, ports in places.items():
            for port, free in ports.items():
                word = word.replace(f"//{other}.{service}:{port}", f"//127.0.0.1:{free}")
                if other == name:
                    word = word.replace(f"//0.0.0.0:{port}", f"//127.0.0.1:{free}")
        return word

    def answers(probe: str, name: str) -> bool:
        try:
            path = container[probe]["httpGet"]["path"]
            return httpx.get(f"http://127.0.0.1:{places[name]['2381']}{path}", trust_env=False).is_success
        except httpx.TransportError:
            return False

    with contextlib.ExitStack() as members:
        for name in names:
            words = [here(word, name) for word in container["args"]]
            folder = tmp_path / name
            folder.mkdir()
            command = [etcd.executable(), *words, "--log-level=error", "--unsafe-no-fsync"]
            members.callback(ServerProcess(command, folder, lambda: True).kill)
        for name in names:
            eventually(lambda name=name: answers("readinessProbe", name) and answers("livenessProbe", name))


def test_redis_takes_its_options(tmp_path):
    container = only_container(by_name(rendered("everything"))["StatefulSet", "fleet-llm-redis"])
    server = RedisServer(tmp_path, *container["args"])
    try:
        told = server.client().config_get("maxmemory*", "protected-mode", "save")
        assert (told["maxmemory"], told["maxmemory-policy"]) == (str(256 << 20), "allkeys-lru")
        assert (told["protected-mode"], told["save"]) == ("no", "")
    finally:
        server.kill()
