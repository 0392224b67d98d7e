"""Test of the flight recorder of a real router: the same machine replays its recording."""

import json
import signal
from threading import Thread
from urllib.request import urlopen

import pytest

from fleet.cli.main import run
from fleet.client import Client
from fleet.net.control.address import control_socket
from tests.support.fleet_processes import start_service, workers_seen
from tests.support.servers.processes import a_free_port
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

TOKENS = 200  # of an answer, which takes about two seconds


class RecordedCluster:
    """A `fleet serve router --record` with simulated workers."""

    def __init__(self, folder, model_dir):
        self.folder = folder
        self.recording = folder / "flight"
        self.grpc = f"127.0.0.1:{a_free_port()}"
        self.processes = []
        self.http = f"127.0.0.1:{a_free_port()}"
        self.config = {
            "http_listen": self.http,
            "grpc_listen": self.grpc,
            "models": {"tiny": str(model_dir)},
            "profiles": {"w": {"model": str(folder / "config.json"), "gpu": "h100"}},
        }
        (folder / "config.json").write_text(json.dumps(LLAMA_8B))
        self.start_router()
        self.workers = {name: self.start("worker", self.worker(name)) for name in ("w0", "w1")}

    def worker(self, name):
        return {
            "worker_id": name,
            "role": "both",
            "engine": "simulated",
            "model": "tiny",
            "listen": f"unix:{self.folder / name}.sock",
            "registry": control_socket(self.grpc),
            "simulated": {"speedup": 0.25, "eos_probability": 0.0, "vocab_size": 500},
        }

    def start_router(self):
        self.router = self.start("router", self.config, "--record", str(self.recording))

    def start(self, part, config, *options):
        file = self.folder / f"{config.get('worker_id', part)}.json"
        with file.with_suffix(".log").open("w") as log:
            process, endpoints = start_service(part, config, file, *options, stdout=log, stderr=log)
        self.processes.append(process)
        assert endpoints, file.with_suffix(".log").read_text()
        return process

    def recorded(self, what):
        """Return how often the text occurs in the recording so far."""
        return self.recording.read_bytes().count(what) if self.recording.exists() else 0

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)


@pytest.fixture
def cluster(tmp_path, model_dir):
    started = RecordedCluster(tmp_path, model_dir)
    try:
        yield started
    finally:
        started.stop()


def ask(cluster, number, tokens, answers):
    prompt = [1, *range(10, 10 + 40 * (number % 3 + 1)), number + 400]
    with Client(cluster.grpc) as client:
        answers.append(client.complete(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True))


def replayed(path, capsys):
    status = run(["sim", "replay", str(path), "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def test_recorded_incident_replays_to_the_same_commands(cluster, capsys):
    with Client(cluster.grpc) as client:
        eventually(lambda: workers_seen(client) == {"w0", "w1"})
    answers = []
    asking = [Thread(target=ask, args=(cluster, number, TOKENS, answers), daemon=True) for number in range(6)]
    for each in asking:
        each.start()
    eventually(lambda: cluster.recorded(b'"Arrived"') == 6 and cluster.recorded(b'["emit"') > 20)
    cluster.workers["w1"].kill()  # during answers, which continue on another worker
    for each in asking:
        each.join(30)
    assert [len(answer.token_ids) for answer in answers] == [TOKENS] * 6
    eventually(lambda: cluster.recorded(b'["complete"') == 6)
    with urlopen(f"http://{cluster.http}/metrics") as answer:
        metrics = answer.read().decode()
    assert 'fleet_predictions_total{model="tiny",of="ttft",role="both",worker="w0"}' in metrics
    assert 'fleet_prediction_error{model="tiny",of="itl",role="both",worker="w0"}' in metrics
    cluster.router.kill()
    cluster.router.wait(30)

    # Another router takes over and leaves the recording of the first one alone.
    incident = cluster.folder / "flight.1"
    cluster.start_router()
    eventually(lambda: incident.exists() and cluster.recorded(b'"WorkerJoined"') == 1)
    cluster.router.send_signal(signal.SIGTERM)
    assert cluster.router.wait(30) == 0
    status, outcome = replayed(cluster.recording, capsys)
    assert (status, outcome["agree"], outcome["notes"]) == (0, True, ["it ends because the router ended"])

    # The recording of the killed router is read to its end, even within a line.
    status, outcome = replayed(incident, capsys)
    assert (status, outcome["agree"], outcome["requests"]) == (0, True, 6)
    assert outcome["notes"] == ["it has no end: the router was killed, or records on"]
    lines = incident.read_bytes().splitlines(keepends=True)
    lost = next(number for number, line in enumerate(lines) if b'"name":"WorkerLeft"' in line)
    assert json.loads(lines[lost])["keys"], "nothing was continued"
    incident.write_bytes(b"".join(lines)[:-5])
    status, outcome = replayed(incident, capsys)
    assert (status, outcome["agree"]) == (0, True)
    assert outcome["notes"] == ["its last line is cut off, as when a router is killed; it was replayed up to there"]

    # Changed events give other commands.
    lines[lost] = lines[lost].replace(b'"worker_id":"w1"', b'"worker_id":"w0"')
    incident.write_bytes(b"".join(lines))
    status, outcome = replayed(incident, capsys)
    assert (status, outcome["agree"]) == (1, False)
    assert (outcome["difference"]["line"], outcome["difference"]["event"]) == (lost + 1, "WorkerLeft")
