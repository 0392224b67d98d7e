"""Commands that operate a cluster of `fleet up`: status, explain, logs and down, and a cluster that vLLM's options describe."""

import re
import signal
import subprocess

import openai
import psutil
import pytest

from fleet.client import Client
from tests.support.fleet_processes import FLEET, fleet_up, run_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} and then"
KEY = "sk-first"
RAW = {"add_special_tokens": False}  # as chat templates do


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operating")
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = (
        *("--served-model-name", "my-model", "--max-model-len", "512", "--tensor-parallel-size", "2"),
        *(
            "--api-key",
            KEY,
            "sk-second",
            "--chat-template",
            str(folder / "chat.jinja"),
            "--host",
            "127.0.0.1",
            "--access-log",
        ),
    )
    with fleet_up(folder, *options, ports=("--port", "0", "--grpc-port", "0")) as up:
        yield up


@pytest.fixture(scope="module")
def client(cluster):
    url = f"{cluster.endpoints['http']}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-second", max_retries=0, timeout=60) as client:
        yield client


def test_generate_without_a_key_names_the_option(cluster):
    address = ("--address", cluster.endpoints["grpc"], "hello")
    without, wrong = run_fleet("generate", *address), run_fleet("generate", "--api-key", "sk-wrong", *address)

    assert without.returncode == wrong.returncode == 1
    assert without.stderr.strip().endswith("; --api-key or --api-key-file gives the key")
    assert wrong.stderr.strip().endswith("; the key of --api-key is not known")


def ask(client):
    messages = [{"role": "user", "content": "one two three"}]
    return client.chat.completions.create(model="my-model", messages=messages, max_tokens=4)


def test_cluster_serves_as_the_options_of_vllm_say(cluster, client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("my-model", 512)

    plain = client.completions.create(model="my-model", prompt="one two three and then", max_tokens=4, extra_body=RAW)
    assert ask(client).usage.prompt_tokens == plain.usage.prompt_tokens
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="sk-third"))


def test_access_log_has_a_line_for_each_request_and_refusal(cluster, client):
    def lines():
        return run_fleet("logs", "router", "-n", "1000", "--address", cluster.grpc).stdout.splitlines()

    answer = ask(client)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none such", prompt="a secret prompt")
    with client.completions.create(model="my-model", prompt="a secret prompt", max_tokens=400, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: any("outcome=cancelled" in line for line in lines()), 30)

    (served,) = [line for line in lines() if f"request={answer.id.removeprefix('chatcmpl-')} " in line]
    expected = (
        r"INFO fleet.access request ended request=\w+ model=my-model tenant=api-key outcome=length placement=\w+"
        r" prompt_tokens=5 cached_tokens=\d+ answer_tokens=4 ttft_ms=[\d.]+ ms=[\d.]+$"
    )
    assert re.search(expected, served), served
    (refused,) = [line for line in lines() if "request refused" in line and "model='none such'" in line]
    assert "outcome=" in refused
    assert not [line for line in lines() if "secret" in line or "sk-" in line]


def test_explain_takes_the_id_of_an_answer(cluster, client):
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-")

    by_answer = run_fleet("explain", answer.id, "--address", cluster.grpc)
    by_request = run_fleet("explain", answer.id.removeprefix("chatcmpl-"), "--address", cluster.grpc)

    assert by_answer.returncode == 0, by_answer.stderr
    assert by_answer.stdout == by_request.stdout
    assert "decode, by fleet, costs in blocks of prefill:" in by_answer.stdout
    unknown = run_fleet("explain", "chatcmpl-nothing", "--address", cluster.grpc)
    assert unknown.returncode == 1
    assert "'nothing' was not placed by this router" in unknown.stderr


def test_status_shows_urls_and_uptime_without_colours(cluster):
    out = run_fleet("status", "--address", cluster.grpc).stdout

    first = out.splitlines()[0]
    assert first.startswith(f"http {cluster.endpoints['http']}/v1  grpc {cluster.grpc}  ")
    assert re.search(r"  up (\d+ min )?\d+ s$", first)
    assert "\x1b" not in out


@pytest.fixture
def _interruptible():
    """Background jobs of a shell ignore Ctrl-C, children inherit that, and these tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_watch_shows_rates_and_percentiles_until_interrupted(cluster, client, tmp_path):
    ask(client)  # a model is shown once it had a request
    log = tmp_path / "watch.txt"
    with log.open("w") as output:
        watch = subprocess.Popen([*FLEET, "status", "--watch", "--address", cluster.grpc], stdout=output, stderr=output)
        try:
            eventually(lambda: "my-model  last " in log.read_text(), 60)
            for _ in range(3):
                ask(client)
            eventually(lambda: re.search(r"TTFT p50 [\d.]+ ms  p99 [\d.]+ ms  TPOT p50 [\d.]+ ms", log.read_text()), 60)
            watch.send_signal(signal.SIGINT)
            assert watch.wait(60) == 0
        finally:
            watch.kill()
            watch.wait()
    text = log.read_text()
    rates = [float(each) for each in re.findall(r"my-model  last \d+ s: ([\d.]+) requests/s", text)]
    assert rates[0] == 0
    assert max(rates) > 0
    assert "router router  up " in text
    assert "Traceback" not in text


def test_logs_are_merged_by_time_or_shown_for_one_process(cluster):
    every = run_fleet("logs", "--address", cluster.grpc).stdout.splitlines()
    names = {line.partition(" | ")[0] for line in every}
    assert {"router", "decode-0", "prefill-0"} <= names
    stamps = [found[0] for line in every if (found := re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+", line))]
    assert stamps == sorted(stamps)
    assert len(stamps) > 3

    router = run_fleet("logs", "router", "-n", "1", "--address", cluster.grpc).stdout.splitlines()
    assert len(router) == 1
    assert router[0] in [line.removeprefix("router | ") for line in every]
    unknown = run_fleet("logs", "rooter", "--address", cluster.grpc)
    assert (unknown.returncode, "'rooter' has no log; there are decode-0" in unknown.stderr) == (3, True)


def test_log_folder_of_a_running_cluster_is_refused(tmp_path):
    logs, first, second = (tmp_path / name for name in ("logs", "first", "second"))
    for folder in (first, second):
        folder.mkdir()
    with fleet_up(first, "--prefill", "0", "--log-dir", str(logs)):
        written = {file.name for file in logs.iterdir()}
        link = tmp_path / "link"
        link.symlink_to(logs)
        refused = run_fleet(
            "up", "--engine", "simulated", "--log-dir", str(link), "--http-port", "0", "--grpc-port", "0"
        )
        assert refused.returncode == 3
        assert refused.stderr.startswith(
            f"fleet: --log-dir: {link}: another cluster of fleet up keeps its logs there; name another"
        )
        assert {file.name for file in logs.iterdir()} == written == {"decode-0.log", "kvstore.log", "router.log"}
    with fleet_up(second, "--prefill", "0", "--log-dir", str(logs)):
        assert {file.name for file in logs.iterdir()} == written


def test_followed_logs_go_on_until_the_cluster_is_down(tmp_path):
    log = tmp_path / "logs.txt"
    with fleet_up(tmp_path, "--prefill", "0", "--log-dir", str(tmp_path / "logs")) as up, log.open("w") as output:
        pids = up.pids()
        follow = subprocess.Popen([*FLEET, "logs", "-f", "--address", up.grpc], stdout=output, stderr=output)
        try:
            eventually(lambda: "worker connected" in log.read_text(), 60)
            seen = log.stat().st_size

            down = run_fleet("down", "--address", up.grpc)

            assert (down.returncode, down.stdout) == (0, f"stopped {up.grpc}\n")
            assert up.process.wait(60) == 0
            assert not [pid for pid in pids if psutil.pid_exists(pid)]
            assert follow.wait(60) == 0
            assert log.stat().st_size > seen
        finally:
            follow.kill()
            follow.wait()
        again = run_fleet("down", "--address", up.grpc)
        assert again.returncode == 3
        assert f"no cluster of fleet up runs on this machine with the router {up.grpc}" in again.stderr
        with Client(up.grpc) as client, pytest.raises(Exception, match="control address of the router is not known"):
            client.status()
