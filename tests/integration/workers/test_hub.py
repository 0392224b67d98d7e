"""Tests of models named by a repository: the official client of the hub against a hub on loopback."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants

from fleet.app import hub_download
from fleet.app.hub import fetch_model, fetch_topology_model
from fleet.app.hub_download import DownloadComplete, DownloadFailed, DownloadFailure, DownloadRequest
from fleet.core.errors import ConfigurationRefused
from fleet.core.hub import HubSettings, Repository
from fleet.core.system_clock import SystemClock
from fleet.core.work import WorkerDescription
from fleet.frontend.text.tokenizer_check import folder_tokenizer_digests
from fleet.local.settings import ClusterSection, Topology
from fleet.router.settings.router import RouterSettings
from tests.support.servers.hub import HubRepository, a_hub
from tests.support.waiting import eventually, until_answered
from tests.support.workers.worker_processes import a_router_stream
from workers.settings import SimulatedSettings, WorkerSettings
from workers.start_phase import StartPhase, telling_phases

pytestmark = pytest.mark.integration

SECONDS = 30
NAME = "fleet-tests/tiny"
TOKEN = "hf_nobodyMayReadThis"
WEIGHTS = bytes(range(256)) * 400
PARTS = {"model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": WEIGHTS[::-1]}


@pytest.fixture
def hub(model_dir, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # other tests may have imported it with another value
    with a_hub() as hub:
        hub.repos[NAME] = HubRepository(model_dir, **PARTS)
        yield hub


@pytest.fixture
def request_for(hub, tmp_path):
    def made(name=NAME, revision="main", *, weights=True, token=""):
        repository = Repository(name, revision)
        return DownloadRequest(
            repository=repository, endpoint=hub.url, cache=str(tmp_path / "cache"), weights=weights, token=token
        )

    return made


def outcome(request):
    """Return the outcome that the download process would report, without a process."""
    try:
        return hub_download.fetch(request, lambda _: None)
    except Exception as error:  # noqa: BLE001 - as its process does
        return hub_download.failed(error)


@pytest.fixture
def a_download():
    """Start download processes, which the fixture ends."""
    started = []

    def start(request):
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet.app.hub_download"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "0"},  # tests with vLLM set this variable
        )
        started.append(process)
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def content_of(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@asynccontextmanager
async def a_process(tmp_path, part, settings):
    """Run `fleet serve`; yield the process."""
    config = tmp_path / f"{part}.json"
    config.write_bytes(msgspec.json.encode(settings))
    with (tmp_path / f"{part}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.cli.main", "serve", part, "--config", str(config)),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def endpoints(process):
    async with asyncio.timeout(SECONDS):
        return json.loads(await process.stdout.readline())


def settings_of(hub, tmp_path, registry=""):
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    hub.token = TOKEN
    told = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url, token_file=str(token))
    router = RouterSettings(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", models={"tiny": NAME}, hub=told)
    worker = WorkerSettings(
        worker_id="w",
        engine="simulated",
        model="tiny",
        model_dir=NAME,
        hub=told,
        registry=registry,
        simulated=SimulatedSettings(speedup=1000),
    )
    return router, worker


async def test_router_and_worker_serve_a_model_from_a_repository(hub, tmp_path, model_dir):
    router, _ = settings_of(hub, tmp_path)
    async with a_process(tmp_path, "router", router) as routing:
        found = await endpoints(routing)
        _, worker = settings_of(hub, tmp_path, registry=found["control"])
        async with a_process(tmp_path, "worker", worker) as working:
            stream = (await endpoints(working))["stream"]
            async with a_router_stream(stream) as asking:
                digests = (await asking.next(WorkerDescription)).tokenizer_digests
            answer = await ask(found["http"], {"model": "tiny", "prompt": "once upon a time", "max_tokens": 4})

    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] < len("once upon a time")  # its tokenizer is used, not bytes
    assert digests.tokens == folder_tokenizer_digests(str(model_dir), 32).tokens  # the worker has the tokenizer too
    assert hub.sent("tokenizer.json") == 1  # both processes share one download
    assert not any(hub.sent(name) for name in PARTS)  # no process runs the model
    assert set(hub.authorised) == {f"Bearer {TOKEN}"}
    logs = (tmp_path / "router.log").read_text() + (tmp_path / "worker.log").read_text()
    assert "the model is there" in logs
    assert TOKEN not in logs


async def ask(address, body):
    """Request a completion; retry until the router knows its worker."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: it\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"

    async def completion() -> dict | None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2]) if answer.startswith(b"HTTP/1.1 200") else None

    return await until_answered(completion, SECONDS)


async def test_worker_stopped_while_downloading_ends_at_once(hub, tmp_path):
    hub.held = "config.json"
    _, worker = settings_of(hub, tmp_path)
    async with a_process(tmp_path, "worker", worker) as process:
        assert await asyncio.to_thread(hub.holding.wait, SECONDS)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    assert (process.returncode, said) == (0, b"")


def test_pinned_revision_is_downloaded_once(hub, request_for):
    fetched = outcome(request_for())
    assert isinstance(fetched, DownloadComplete)
    assert content_of(fetched.folder) == hub.repos[NAME].files
    assert fetched.commit == hub.repos[NAME].commit

    hub.asked.clear()
    assert outcome(request_for(revision=fetched.commit)) == fetched
    assert hub.asked == []


def test_unreachable_hub_does_not_stop_a_downloaded_model(hub, request_for):
    fetched = outcome(request_for())
    hub.failing = 1000

    again = outcome(request_for())

    assert (again.folder, again.commit) == (fetched.folder, fetched.commit)
    assert "503" in again.asked
    assert outcome(request_for(weights=False)).folder == fetched.folder


def test_router_download_is_incomplete_for_a_worker(hub, request_for):
    assert isinstance(outcome(request_for(weights=False)), DownloadComplete)
    hub.failing = 1000
    assert outcome(request_for()).failure is DownloadFailure.UNREACHABLE


def test_killed_download_resumes_with_the_missing_files(hub, request_for, tmp_path, a_download):
    (first, last) = PARTS
    hub.held = last
    process = a_download(request_for())
    assert hub.holding.wait(SECONDS)
    blobs = tmp_path / "cache" / "models--fleet-tests--tiny" / "blobs"
    whole = hub.repos[NAME].etag(first)
    eventually(lambda: (blobs / whole).exists() and len(list(blobs.glob("*.incomplete"))) == 1)
    process.kill()
    process.wait()
    assert len(list(blobs.glob("*.incomplete"))) == 1
    hub.go_on()

    fetched = outcome(request_for())

    assert content_of(fetched.folder) == hub.repos[NAME].files
    assert (hub.sent(first), hub.sent(last)) == (1, 2)
    assert not list(blobs.glob("*.incomplete"))


def test_two_processes_with_one_cache_download_each_file_once(hub, request_for, tmp_path, a_download):
    last = list(PARTS)[-1]
    hub.held = last
    process = a_download(request_for())
    assert hub.holding.wait(SECONDS)
    found = []
    other = threading.Thread(target=lambda: found.append(outcome(request_for())), daemon=True)
    other.start()
    blobs = tmp_path / "cache" / "models--fleet-tests--tiny" / "blobs"
    heads = lambda: sum(path.endswith(last) and method == "HEAD" for method, path in hub.asked)  # noqa: E731
    eventually(lambda: heads() == 2)
    assert len(list(blobs.glob("*.incomplete"))) == 1  # the download of the first process is left alone
    hub.go_on()
    other.join(SECONDS)
    said = process.stdout.read()

    ended = msgspec.json.decode(said.splitlines()[-1], type=hub_download.Event)
    assert found == [ended]
    assert content_of(ended.folder) == hub.repos[NAME].files
    assert hub.sent(last) == 1


def test_download_ends_with_its_starter(hub, request_for, a_download):
    hub.held = "config.json"
    process = a_download(request_for())
    assert hub.holding.wait(SECONDS)
    process.stdin.close()
    assert process.wait(SECONDS) == 1


@pytest.mark.parametrize(
    ("wrong", "failure"),
    [
        ({"name": "fleet-tests/nobody"}, DownloadFailure.REPOSITORY),
        ({"name": "fleet--tests/nobody"}, DownloadFailure.REPOSITORY),
        ({"revision": "v9"}, DownloadFailure.REVISION),
        ({"token": "hf_wrong"}, DownloadFailure.TOKEN),
    ],
    ids=["repository", "name", "revision", "token"],
)
def test_permanent_failures_are_told_apart(hub, request_for, wrong, failure):
    hub.token = TOKEN
    failed = outcome(request_for(**wrong))
    assert (type(failed), failed.failure) == (DownloadFailed, failure)
    assert "hf_wrong" not in failed.cause


@pytest.mark.parametrize("token", ["", TOKEN], ids=["no token", "not let in"])
def test_a_gated_repository_is_told_apart(hub, request_for, token):
    hub.token, hub.repos[NAME].gated = TOKEN, "hf_another"
    assert outcome(request_for(token=token)).failure is DownloadFailure.GATED
    hub.repos[NAME].gated = TOKEN
    assert isinstance(outcome(request_for(token=TOKEN)), DownloadComplete)


def test_model_without_disk_space_is_rejected_before_download(hub, request_for):
    hub.sizes[next(iter(PARTS))] = 1 << 60
    failed = outcome(request_for())
    assert failed.failure is DownloadFailure.SPACE
    assert "1073741824.0 GiB are to be fetched" in failed.cause
    assert not any(method == "GET" and "/resolve/" in path for method, path in hub.asked)


def test_repository_without_usable_weights_is_told_apart(hub, request_for, model_dir):
    hub.repos[NAME] = HubRepository(model_dir)
    assert outcome(request_for()) == DownloadFailed(DownloadFailure.INCOMPLETE, "*.safetensors weights")


def test_a_cache_that_cannot_be_written_is_told_apart(hub, request_for, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert outcome(request_for()).failure is DownloadFailure.CACHE


async def test_rejection_names_the_field_and_the_remedy(hub, tmp_path):
    settings = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url)
    hub.repos[NAME].gated = "hf_another"
    with pytest.raises(ConfigurationRefused) as refused:
        await fetch_model(NAME, settings, SystemClock(), field="model_dir", weights=True)
    assert str(refused.value) == (
        f"model_dir: {NAME} is gated; accept its terms at {hub.url}/{NAME}, and name a file with a token that may read"
        " it in hub.token_file"
    )


async def test_busy_hub_is_asked_again(hub, tmp_path):
    hub.failing = 1
    settings = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url)
    model = await fetch_model(NAME, settings, SystemClock(), field="model_dir", weights=False)
    assert model.named == f"{NAME}@{hub.repos[NAME].commit}"


async def test_silent_hub_is_given_up_after_the_timeout(hub, tmp_path):
    hub.held = "config.json"
    settings = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url, patience_seconds=3)
    with pytest.raises(ConfigurationRefused, match=rf"^hub.endpoint: nothing of {NAME} came from {hub.url} for 3 s"):
        await fetch_model(NAME, settings, SystemClock(), field="model_dir", weights=True)


async def test_cluster_serves_a_repository_by_its_name(hub, tmp_path):
    told = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url)
    topology = Topology(cluster=ClusterSection(model=f"{NAME}@main", engine="simulated"), hub=told)
    fetched = await fetch_topology_model(topology, tmp_path, SystemClock())
    assert fetched.cluster.served_name == NAME
    assert content_of(fetched.cluster.model).keys() == hub.repos[NAME].files.keys() - PARTS.keys()


async def test_phase_of_a_download_is_noted_only_for_a_download(hub, tmp_path, model_dir):
    told: list[StartPhase] = []
    settings = HubSettings(cache=str(tmp_path / "cache"), endpoint=hub.url)
    with telling_phases(told.append):
        await fetch_model(str(model_dir), settings, SystemClock(), field="model_dir", weights=False)
        assert told == []
        await fetch_model(NAME, settings, SystemClock(), field="model_dir", weights=False)

    assert told == [StartPhase.FETCH]


async def test_a_folder_needs_no_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    nowhere = HubSettings(endpoint="http://127.0.0.1:9", patience_seconds=0.1)
    model = await fetch_model("owner/name", nowhere, SystemClock(), field="model_dir", weights=True)
    assert (model.folder, model.named) == ("owner/name", "owner/name")


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\n"], ids=["missing", "empty", "words", "bytes"])
async def test_a_token_file_without_a_token_is_rejected(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    settings = HubSettings(cache=str(tmp_path), endpoint="http://127.0.0.1:9", token_file=str(file))
    with pytest.raises(ConfigurationRefused, match=r"^hub.token_file: ") as refused:
        await fetch_model(NAME, settings, SystemClock(), field="model_dir", weights=True)
    assert "words" not in str(refused.value)
