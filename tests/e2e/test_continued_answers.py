"""Answers whose worker is killed in their middle, as a client of the HTTP API sees them: nothing differs from an undisturbed run."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from fleet.client import Client
from tests.support.fleet_processes import LocalClusterProcess, fleet_up, workers_seen
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOPOLOGY = """
cluster.kv_paths = []

[[pools]]
role = "both"
replicas = 2
simulated.speedup = 1.0
"""
HOT = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
SHOWN_TOKENS = 8  # of each answer, before the worker is killed


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClusterProcess]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    (folder / "fleet.toml").write_text(TOPOLOGY)
    with fleet_up(folder, "--config", str(folder / "fleet.toml")) as cluster:
        yield cluster


@contextmanager
def streamed(up: LocalClusterProcess, body: dict) -> Iterator[Iterator[dict]]:
    with (
        httpx.Client(base_url=up.endpoints["http"], timeout=60) as http,
        http.stream("POST", "/v1/completions", json={**HOT, **body, "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        yield (json.loads(line) for line in lines if line != "[DONE]")


class Choice:
    """One answer of a stream, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.parts = 0
        self.finish = ""
        self.logprobs: list[float] = []
        self.top: list[dict[str, float]] = []

    def add(self, part: dict) -> None:
        self.parts += 1
        self.text += part["text"]
        self.finish = part["finish_reason"] or self.finish
        if logprobs := part.get("logprobs"):
            self.logprobs += logprobs["token_logprobs"]
            self.top += logprobs["top_logprobs"]

    def told(self) -> tuple[object, ...]:
        return self.text, self.finish, self.logprobs, self.top


def ask(up: LocalClusterProcess, body: dict, disturb: Callable[[], None] | None = None) -> list[Choice]:
    """Stream the answers; call `disturb` when all of them have begun."""
    choices = [Choice() for _ in range(body.get("n", 1))]
    with streamed(up, body) as events:
        for event in events:
            assert "error" not in event, event
            for part in event["choices"]:
                choices[part["index"]].add(part)
            if disturb is not None and all(each.parts >= SHOWN_TOKENS for each in choices):
                disturb()
                disturb = None
    assert disturb is None, "the answers ended too early"
    return choices


def continued(up: LocalClusterProcess) -> float:
    """Return how many answers of this router another worker has continued."""
    page = httpx.get(f"{up.endpoints['health']}/metrics", timeout=60).text
    (value,) = [line.split()[-1] for line in page.splitlines() if line.startswith("fleet_continued_total")]
    return float(value)


def kill_a_busy_worker(up: LocalClusterProcess, client: Client) -> None:
    busy = [each.worker_id for pool in client.status().pools for each in pool.workers if each.booked_requests]
    psutil.Process(up.pid_of(busy[0])).send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "body",
    [
        {"n": 3, "seed": 7},
        {"n": 2, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
        {"seed": 7, "logprobs": 2, "min_tokens": 40},
        {"seed": 7, "bad_words": ["the"], "include_stop_str_in_output": True},
    ],
    ids=["n", "penalties", "logprobs", "stop string"],
)
def test_killed_worker_changes_no_answer(up, body):
    with Client(up.grpc) as client:
        eventually(lambda: len(workers_seen(client)) == 2)
        if "include_stop_str_in_output" in body:
            (whole,) = ask(up, body)
            body = {**body, "stop": whole.text[len(whole.text) * 3 // 4 :][:6]}
        expected = ask(up, body)
        before = continued(up)

        answers = ask(up, body, lambda: kill_a_busy_worker(up, client))

        assert [each.told() for each in answers] == [each.told() for each in expected]
        assert continued(up) > before
        assert {each.finish for each in answers} == {"stop" if "stop" in body else "length"}
