"""Access records of a whole cluster with prefill and decode workers."""

import json
from collections import Counter

import httpx
import pytest

from tests.support.fleet_processes import fleet_up, run_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

REQUESTS = 12


def records_of(folder):
    files = [each for each in folder.iterdir() if each.name.startswith("access.jsonl")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_records_name_the_workers_of_each_request(tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text(
        f"[router.access_records]\npath = '{tmp_path}/access.jsonl'\n[router]\nremote_prefill_min_tokens = 1\n"
    )
    with fleet_up(tmp_path, "--config", str(topology)) as up:
        for number in range(REQUESTS):
            body = {"model": "tiny", "prompt": f"{number} times a secret prompt", "max_tokens": 4, "ignore_eos": True}
            httpx.post(f"{up.endpoints['http']}/v1/completions", json=body, timeout=60).raise_for_status()
        eventually(lambda: len(records_of(tmp_path)) == REQUESTS)
        assert up.end() == 0
    records = records_of(tmp_path)
    assert Counter(each["outcome"] for each in records) == {"length": REQUESTS}
    assert len({each["request_id"] for each in records}) == REQUESTS
    for each in records:
        (placement,) = each["placements"]
        assert (each["placement"], placement["worker"], placement["prefill_worker"]) == (
            "disaggregated",
            "decode-0",
            "prefill-0",
        )
        assert [(phase["phase"], phase["worker"]) for phase in each["kv"]] == [
            ("prefill", "prefill-0"),
            ("decode", "decode-0"),
        ]
        assert each["output_tokens"] == 4
        assert each["queue_seconds"] is not None
    assert "secret" not in json.dumps(records)


def test_path_of_records_that_cannot_be_written_ends_the_start(tmp_path):
    settings = tmp_path / "router.toml"
    settings.write_text(
        "http_listen = '127.0.0.1:0'\ngrpc_listen = '127.0.0.1:0'\n[access_records]\npath = '/nowhere/a'\n"
    )
    ran = run_fleet("serve", "router", "--config", str(settings))
    assert ran.returncode == 3
    assert "access_records.path: /nowhere/a: No such file or directory" in ran.stderr
