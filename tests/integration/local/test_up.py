"""Tests of `fleet up` as its users see it, with the simulated engine."""

import json
import os
import shlex
import signal
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.client import Client, FleetError, Placement, Source
from fleet.core.errors import Reason
from fleet.core.requests import Finish
from fleet.core.roles import KvPath, Phase
from fleet.local.tiny_model import CONFIG
from fleet.router.placement.break_even import MAX_TOKENS, MIN_TOKENS
from kvstore.security.credentials import Credentials
from loadtests.clients.programs.registry import PROGRAMS, run_script
from loadtests.clients.results import SIMULATED_REFUSALS, CallOutcome, missing_here
from operators.chart.metric_catalogue import ROUTER
from tests.support.fleet_processes import alive, fleet_up, is_listening, run_fleet
from tests.support.metric_pages import differences
from tests.support.shared_memory import remaining_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

PROMPT = list(range(100, 300))  # six full blocks and a part


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    topology = folder / "topology.toml"
    topology.write_text("[cluster.adapters]\nada = 'adapters/ada'\n")
    with fleet_up(folder, "--config", str(topology), "--kv-paths", "store,direct", "--demo", "Hello") as up:
        yield up


def ask_over_http(cluster, **fields):
    body = json.dumps({"model": "tiny", "max_tokens": 4, "ignore_eos": True, **fields}).encode()
    request = Request(f"{cluster.endpoints['http']}/v1/completions", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return json.load(response)


def test_ready_file_describes_the_cluster(cluster):
    assert cluster.endpoints["model"] == "tiny"
    assert cluster.endpoints["pids"].keys() == {"supervisor", "kvstore", "router", "prefill-0", "decode-0"}
    assert cluster.endpoints["pids"]["supervisor"] == cluster.process.pid
    assert alive(cluster.endpoints["pids"].values()) == list(cluster.endpoints["pids"].values())


def test_grpc_prompt_moves_blocks_from_prefill_to_decode(cluster):
    with Client(cluster.grpc) as client:
        result = client.complete(PROMPT, max_tokens=8, ignore_eos=True, placement=Placement.DISAGGREGATED)

    assert len(result.token_ids) == 8
    prefill, decode = result.kv
    assert (prefill.worker_id, decode.worker_id) == ("prefill-0", "decode-0")
    moved = sum(origin.blocks for origin in decode.report.origins if origin.source is Source.STORE)
    assert moved == len(PROMPT) // 32


@pytest.mark.parametrize(
    ("options", "phases", "moved"),
    [
        ({"placement": Placement.AGGREGATED}, [Phase.AGGREGATED], {Source.COMPUTED: 7}),
        (
            {"placement": Placement.DISAGGREGATED, "kv_path": KvPath.STORE},
            [Phase.PREFILL, Phase.DECODE],
            {Source.STORE: 6, Source.COMPUTED: 1},
        ),
        (
            {"placement": Placement.DISAGGREGATED, "kv_path": KvPath.DIRECT},
            [Phase.PREFILL, Phase.DECODE],
            {Source.DIRECT: 6, Source.COMPUTED: 1},
        ),
    ],
)
def test_stopped_answer_still_carries_its_kv_report(cluster, options, phases, moved):
    """Check that the counters add up to the prompt's blocks, although no engine finished."""
    with Client(cluster.grpc) as client:
        asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, **options}
        whole = client.complete(PROMPT, **asked, tenant=f"all of {options}")
        stop = whole.text[len(whole.text) // 2 :][:5]

        stopped = client.complete(PROMPT, **asked, tenant=f"half of {options}", stop=stop)

    assert stopped.finish is Finish.STOP
    assert whole.text.startswith(stopped.text)
    assert 1 < stopped.usage.completion_tokens < 60
    assert [phase.phase for phase in stopped.kv] == phases
    for phase in stopped.kv:
        assert sum(origin.blocks for origin in phase.report.origins) == phase.report.prompt_blocks == 7
    assert {origin.source: origin.blocks for origin in stopped.kv[-1].report.origins} == moved
    assert stopped.usage.cached_tokens == 0, "every token was computed by one of the phases"


def kv_counters(cluster):
    """Return the router's counters of KV blocks and bytes, by phase and source."""
    with urlopen(f"{cluster.endpoints['http'].removesuffix('/v1')}/metrics", timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    counted: Counter[tuple[str, str, str]] = Counter()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name in ("fleet_kv_blocks_total", "fleet_kv_bytes_total"):
            counted[sample.name, sample.labels["phase"], sample.labels["source"]] += int(sample.value)
    return counted


def test_page_of_metrics_matches_the_catalogue(cluster):
    ask_over_http(cluster, prompt=PROMPT)
    with suppress(HTTPError):
        ask_over_http(cluster, prompt=PROMPT, model="nobody's")
    with urlopen(f"{cluster.endpoints['health']}/metrics", timeout=60) as response:
        page = response.read().decode()

    assert differences(page, ROUTER, "router") == []
    assert 'fleet_requests_total{model="unknown",outcome="model_not_found",placement="unknown"}' in page
    assert 'gen_ai_operation_name="text_completion",gen_ai_provider_name="fleet",gen_ai_request_model="tiny"' in page


def test_router_block_counters_equal_the_sum_of_kv_reports(cluster):
    """Use both frontends, both KV paths and one worker, for new prompts and for cached and stored ones."""
    ways = [
        {"placement": "aggregated"},
        {"placement": "disaggregated", "kv_path": "store"},
        {"placement": "disaggregated", "kv_path": "direct"},
    ]
    told = []
    before = kv_counters(cluster)
    with Client(cluster.grpc) as client:
        for number, way in enumerate(ways * 2):
            prompt = [1000 + number % 3, *PROMPT]
            names = {"placement": Placement(way["placement"])}
            if "kv_path" in way:
                names["kv_path"] = KvPath(way["kv_path"])
            result = client.complete(prompt, max_tokens=4, ignore_eos=True, **names)
            told += [msgspec.to_builtins(phase) for phase in result.kv]
            answer = ask_over_http(cluster, prompt=[2000, *prompt], fleet=way)
            told += answer["fleet"]["kv"]
    counted = kv_counters(cluster) - before

    summed = Counter()
    for phase in told:
        report = phase.get("report", phase)
        assert sum(origin["blocks"] for origin in report["origins"]) == report["prompt_blocks"] == 7
        for origin in report["origins"]:
            summed["fleet_kv_blocks_total", phase["phase"], origin["source"]] += origin["blocks"]
            summed["fleet_kv_bytes_total", phase["phase"], origin["source"]] += origin["bytes"]
    assert counted == +summed
    assert {source for _, _, source in counted} == {"engine", "store", "direct", "computed"}


def test_a_prompt_goes_in_over_http(cluster):
    assert ask_over_http(cluster, prompt="Hello", max_tokens=5)["usage"]["completion_tokens"] == 5


def test_lora_adapter_of_the_topology_shares_no_block(cluster):
    with Client(cluster.grpc) as client:
        own, adapted = (client.complete(PROMPT, model=name, max_tokens=8) for name in ("tiny", "ada"))
        again = client.complete(PROMPT, model="ada", max_tokens=8)

    assert own.token_ids != adapted.token_ids == again.token_ids
    assert adapted.usage.cached_tokens == 0
    assert again.usage.cached_tokens > 0


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "structured_outputs.regex"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_unsupported_option_is_rejected_under_the_clients_name(cluster, asked, field):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **asked}
    request = Request(
        f"{cluster.endpoints['http']}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )

    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=60)

    with refused.value:
        error = json.load(refused.value)["error"]
    assert (refused.value.status, error["param"], error["code"]) == (400, field, "invalid_argument")
    assert error["message"].startswith(f"{field}: ")


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr(cluster):
    done = run_fleet("generate", "Hello", "--address", cluster.grpc, "--max-tokens", "5")

    assert done.returncode == 0
    assert done.stdout.strip()
    assert "5 tokens" in done.stderr
    hint = done.stderr.splitlines()[-1].removesuffix(" says why there")
    assert run_fleet(*shlex.split(hint)[1:]).returncode == 0, hint


def test_generate_as_json_is_one_object(cluster):
    done = run_fleet("generate", "Hello", "--address", cluster.grpc, "--max-tokens", "5", "--json", "--chat")

    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) == 5
    assert answer["usage"]["completion_tokens"] == 5


def test_generate_says_in_one_line_what_was_refused(cluster):
    done = run_fleet("generate", "Hello", "--address", cluster.grpc, "--temperature", "-1")

    assert done.returncode == 1
    assert done.stdout.strip() == ""
    assert done.stderr.startswith("fleet: sampling.temperature: ")
    assert done.stderr.count("\n") == 1


def test_explain_gives_terms_that_add_up(cluster):
    with Client(cluster.grpc) as client:
        asked = client.complete(PROMPT, max_tokens=2, placement=Placement.DISAGGREGATED)
    done = run_fleet("explain", asked.request_id, "--address", cluster.grpc, "--json")
    shown = run_fleet("explain", asked.request_id, "--address", cluster.grpc)

    (placed,) = json.loads(done.stdout)["placements"]
    assert (placed["decode"], placed["prefill"], placed["why"]) == ("decode-0", "prefill-0", "asked_by_client")
    for candidate in placed["candidates"] + placed["prefill_candidates"]:
        assert sum(candidate["parts"].values()) == pytest.approx(candidate["cost"])
    assert "prefill on prefill-0, decode on decode-0, blocks by store: asked by client" in shown.stdout
    assert "decode-0" in shown.stdout


def test_explain_of_an_unknown_request_is_one_line(cluster):
    done = run_fleet("explain", "nobody", "--address", cluster.grpc)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "request_id: 'nobody'" in done.stderr


def test_thresholds_can_be_shown_set_and_are_checked(cluster):
    before = json.loads(run_fleet("router", "thresholds", "--address", cluster.grpc, "--json").stdout)
    changed = run_fleet("router", "thresholds", "max_queued=7", "--address", cluster.grpc, "--json")
    after = json.loads(run_fleet("router", "thresholds", "--address", cluster.grpc, "--json").stdout)
    wrong = run_fleet("router", "thresholds", "oversubscribe=-1", "--address", cluster.grpc)
    unknown = run_fleet("router", "thresholds", "colour=1", "--address", cluster.grpc)
    large = run_fleet("router", "thresholds", "max_queued=1234567", "--address", cluster.grpc)

    assert large.stdout.split()[:2] == ["max_queued", "1234567"]
    assert json.loads(changed.stdout) == after == before | {"max_queued": 7}
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "oversubscribe: expected" in wrong.stderr
    assert "colour: there is no such threshold" in unknown.stderr
    run_fleet("router", "thresholds", f"max_queued={before['max_queued']}", "--address", cluster.grpc)


def test_measured_prefill_break_even_is_reported(cluster):
    """Run the required number of handoffs; the break-even of the decode worker appears in a table and as JSON."""
    with Client(cluster.grpc) as client:
        for number in range(client.remote_prefill().handoffs_needed):
            prompt = [number + 3, *PROMPT[1:]]
            client.complete(prompt, max_tokens=2, ignore_eos=True, placement=Placement.DISAGGREGATED)

    found = json.loads(run_fleet("router", "thresholds", "--address", cluster.grpc, "--json").stdout)["remote_prefill"]
    (worker,) = found["workers"]
    assert found["learned"] is False
    assert found["handoffs"] >= found["handoffs_needed"]
    assert (worker["worker_id"], worker["requests"]) == ("decode-0", 0)
    even = found["handoff_ms"] / worker["token_ms"]
    assert worker["min_tokens"] == pytest.approx(min(max(even, MIN_TOKENS), MAX_TOKENS), abs=1)
    table = run_fleet("router", "thresholds", "--address", cluster.grpc).stdout
    assert "learn_remote_prefill is off" in table
    assert f"decode-0: from {worker['min_tokens']} tokens on" in table


def test_status_shows_pools_workers_and_store(cluster):
    status = json.loads(run_fleet("status", "--address", cluster.grpc, "--json").stdout)

    assert {
        (pool["role"], worker["worker_id"], worker["state"]) for pool in status["pools"] for worker in pool["workers"]
    } == {
        ("prefill", "prefill-0", "serving"),
        ("decode", "decode-0", "serving"),
    }
    assert status["store"]["capacity_bytes"] == 256 << 20
    table = run_fleet("status", "--address", cluster.grpc).stdout
    assert "decode-0" in table
    assert "router" in table


def test_status_without_a_router_fails_with_one_line():
    done = run_fleet("status", "--address", "127.0.0.1:1")

    assert done.returncode == 1
    assert done.stderr.startswith("fleet: 127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1


def test_sockets_lie_in_one_private_folder_with_a_short_path(cluster):
    folder = cluster.runtime_folder()

    assert folder.stat().st_mode & 0o077 == 0
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} >= {"kvstore.sock", "prefill-0.sock", "decode-0.sock"}
    assert max(len(str(path)) for path in sockets) < 100


def test_next_request_works_after_decode_worker_was_killed(tmp_path):
    with fleet_up(tmp_path) as up, Client(up.grpc) as client:
        before = client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        killed = up.pid_of("decode-0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: up.pid_of("decode-0") not in (0, killed))
        eventually(lambda: len(client.status().pools) == 2)

        after = client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, placement=Placement.DISAGGREGATED)

        assert after.token_ids == before.token_ids
        assert "starting it again" in (tmp_path / "up.log").read_text()


def test_seeded_unary_answer_survives_a_killed_worker(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text("[[pools]]\nrole = 'both'\nreplicas = 2\n[pools.simulated]\nspeedup = 0.05\n")
    asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 3, "temperature": 1.0, "frequency_penalty": 0.2}
    with fleet_up(tmp_path, "--config", str(path)) as up, Client(up.grpc) as client, ThreadPoolExecutor(1) as thread:
        expected = ask_over_http(up, **asked)["choices"][0]["text"]

        def running() -> list[tuple[str, int]]:
            workers = [worker for pool in client.status().pools for worker in pool.workers]
            return [(worker.worker_id, worker.kv_blocks_used) for worker in workers if worker.running]

        def begun() -> str:
            """Wait until the workers have computed tokens of the answer, whose blocks follow those of the prompt."""
            return next((worker for worker, blocks in running() if blocks > len(PROMPT) // 32 + 1), "")

        eventually(lambda: not running())
        answering = thread.submit(ask_over_http, up, **asked)
        os.kill(up.pid_of(eventually(begun)), signal.SIGKILL)

        assert answering.result(60)["choices"][0]["text"] == expected


def test_the_smallest_cluster_has_its_store_in_the_only_worker(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text("[store]\nplace = 'worker'\ncapacity_mib = 8\n[[pools]]\nrole = 'both'\n")
    with fleet_up(tmp_path, "--config", str(path)) as up, Client(up.grpc) as client:
        assert up.endpoints["pids"].keys() == {"supervisor", "router", "both-0"}
        before = client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)

        eventually(lambda: (store := client.status().store) is not None and store.blocks >= len(PROMPT) // 32)
        assert client.status().store.capacity_bytes == 8 << 20
        killed = up.pid_of("both-0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: up.pid_of("both-0") not in (0, killed))
        eventually(lambda: len(client.status().pools) == 1)

        after = client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        assert after.token_ids == before.token_ids
        eventually(lambda: (store := client.status().store) is not None and store.blocks >= len(PROMPT) // 32)
        folder = up.runtime_folder()
        assert up.end() == 0
    assert not folder.exists()


def test_workers_register_where_control_has_a_port_of_its_own(tmp_path):
    path = tmp_path / "topology.toml"
    secret = tmp_path / "secret"
    secret.write_text("a secret of this cluster")
    path.write_text(
        "[router]\ncontrol_listen = '127.0.0.1:0'\n[[pools]]\nrole = 'both'\n"
        f"[router.control_credentials]\nsecret_file = '{secret}'\n"
    )
    with fleet_up(tmp_path, "--config", str(path)) as up:
        credentials = Credentials(secret_file=str(secret))
        with Client(up.grpc, control=up.endpoints["control"], control_credentials=credentials) as control:
            assert [worker.state for pool in control.status().pools for worker in pool.workers] == ["serving"]
        with Client(up.grpc) as client:
            assert client.complete(PROMPT, max_tokens=1).finish


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_cluster_leaves_nothing_behind(tmp_path, number):
    with fleet_up(tmp_path) as up:
        pids, segments, folder = up.pids(), up.segments(), up.runtime_folder()
        ports = [int(up.endpoints[name].rpartition(":")[2]) for name in ("http", "grpc")]
        assert len(pids) >= 5
        assert all(is_listening(port) for port in ports)

        assert up.end(number) == 0

    assert alive(pids) == []
    assert not any(is_listening(port) for port in ports)
    assert not folder.exists()
    eventually(lambda: not remaining_of(segments))


def test_killed_cluster_leaves_nothing(tmp_path):
    with fleet_up(tmp_path) as up:
        pids, folder = up.pids(), up.runtime_folder()

        up.end(signal.SIGKILL)

        eventually(lambda: alive(pids) == [])
        eventually(lambda: not folder.exists())


def test_a_running_answer_is_finished_before_a_stop(tmp_path):
    with fleet_up(tmp_path) as up, Client(up.grpc) as client:
        with client.generate(PROMPT, max_tokens=200, ignore_eos=True) as stream:
            first = next(stream)
            up.process.send_signal(signal.SIGINT)
            rest = [token for delta in stream for token in delta.token_ids]
        assert len(first.token_ids) + len(rest) == 200
        assert up.process.wait(30) == 0


def error_lines(said):
    """Return the error lines, without the notices that a busy machine delays the start."""
    return [line for line in said.splitlines() if not line.startswith("fleet: loading ")]


def test_port_in_use_is_rejected_in_one_line(tmp_path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = run_fleet("up", "--engine", "simulated", "--http-port", str(port), "--grpc-port", "0")

    assert done.returncode == 3
    assert error_lines(done.stderr) == [
        f"fleet: router.http_listen: 127.0.0.1:{port} is in use; name another port, or 0 for any free one"
    ]
    assert done.stdout == ""


def test_invalid_model_folder_is_rejected_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "tokenizer.json").write_text("{}")

    done = run_fleet("up", "--engine", "simulated", "--model", str(tmp_path), "--http-port", "0", "--grpc-port", "0")

    assert done.returncode == 3
    assert done.stderr.startswith(f"fleet: cluster.model: {tmp_path}")
    assert done.stderr.count("\n") == 1


def test_error_found_by_a_child_is_one_line_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")

    done = run_fleet("up", "--engine", "simulated", "--model", str(tmp_path), "--http-port", "0", "--grpc-port", "0")

    assert done.returncode == 3, done.stderr
    (said,) = error_lines(done.stderr)
    assert str(tmp_path / "tokenizer.json") in said


def test_unknown_key_is_rejected_with_its_path(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text("[cluster]\nengine = 'simulated'\n[[pools]]\nrole = 'both'\nreplica = 2\n")

    done = run_fleet("up", "--config", str(path))

    assert done.returncode == 3
    assert done.stderr == f"fleet: {path}: pools[0].replica: is not a known key; did you mean 'replicas'?\n"


def test_check_passes_for_both_kv_paths():
    done = run_fleet("up", "--engine", "simulated", "--check")

    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["path"] for verdict in verdicts] == ["store", "direct"]
    for verdict in verdicts:
        assert verdict["ok"] is True
        assert verdict["prompts"] >= 20
        assert verdict["identical"] == verdict["prompts"]
        assert verdict["blocks_moved"] > 0
        assert verdict["bytes_moved"] > 0
        assert verdict["ttft_ms"] > 0
        assert verdict["tpot_ms"] > 0


def test_the_check_fails_when_tokens_differ(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text(
        """
        [cluster]
        engine = "simulated"
        [[pools]]
        role = "prefill"
        simulated = {seed = 1}
        [[pools]]
        role = "decode"
        simulated = {seed = 2}
        """
    )

    done = run_fleet("up", "--config", str(path), "--check", "--kv-paths", "store")

    assert done.returncode == 1
    (verdict,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert verdict["ok"] is False


def test_check_uses_no_port_of_the_topology(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        path = tmp_path / "topology.toml"
        path.write_text(
            f"""
            [cluster]
            engine = "simulated"
            [router]
            health_listen = "{listen}"
            control_listen = "{listen}"
            control_credentials.insecure = true
            kserve_listen = "{listen}"
            replicas_listen = "{listen}"
            endpoint_picker = {{host = "127.0.0.1", port = {port}}}
            [store]
            metrics_listen = "{listen}"
            [[pools]]
            role = "prefill"
            metrics_listen = "{listen}"
            simulated.direct_listen = "{listen}"
            [[pools]]
            role = "decode"
            metrics_listen = "{listen}"
            """
        )
        done = run_fleet("up", "--config", str(path), "--check", "--kv-paths", "direct")

    assert done.returncode == 0, done.stderr


def test_openai_client_is_served_or_told_the_refused_field(cluster, tmp_path):
    address = f"{cluster.endpoints['http']}/v1"

    results = run_script(Path(sys.executable), PROGRAMS["openai"].script, address, "tiny", tmp_path, tmp_path)

    assert missing_here(results, SIMULATED_REFUSALS) == {}
    refused = {result.call: result.field for result in results if result.outcome is CallOutcome.REFUSED}
    assert refused == SIMULATED_REFUSALS, "a call that is served has no place in the list"


@pytest.mark.parametrize("placement", ["aggregated", "disaggregated"])
def test_answers_of_one_request_share_their_prefill(cluster, placement):
    first = 500 if placement == "aggregated" else 900  # prompts that no other test has sent
    fields = {"prompt": list(range(first, first + 330)), "n": 4, "temperature": 1, "fleet": {"placement": placement}}

    answer = ask_over_http(cluster, **fields)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 330
    computed = [
        sum(origin["blocks"] for origin in phase["origins"] if origin["source"] == "computed")
        for phase in answer["fleet"]["kv"]
        if phase["phase"] in ("aggregated", "prefill")
    ]
    assert computed == [11, 1, 1, 1], "the others compute only the last block, which is not full"


def test_demo_is_served_where_clients_need_a_key(tmp_path):
    topology = tmp_path / "topology.toml"
    digest = sha256(b"key").hexdigest()
    topology.write_text(f"[router.tenants.acme]\napi_key_sha256 = ['{digest}']\n")

    with fleet_up(tmp_path, "--config", str(topology), "--prefill", "0", "--demo", "Hello") as up:
        log = tmp_path / "up.log"
        eventually(lambda: "prompt tokens" in log.read_text() or "failed" in log.read_text())
        assert "the demo failed" not in log.read_text()
        with Client(up.grpc) as client, pytest.raises(FleetError) as refused:
            client.complete(PROMPT, max_tokens=1)
    assert refused.value.reason is Reason.UNAUTHENTICATED
