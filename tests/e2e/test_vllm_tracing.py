"""Test of the trace of a request whose prefill and decode ran on two vLLM workers, as a collector got it."""

from importlib.util import find_spec

import httpx
import pytest

from tests.support.fleet_processes import fleet_up
from tests.support.servers.otlp_collector import an_otlp_collector

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300
TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOPOLOGY = """
router.remote_prefill_min_tokens = 32

[tracing]
endpoint = "{endpoint}"
export_seconds = 0.1

[[pools]]
role = "prefill"
vllm.kv_cache_gib = 0.25

[[pools]]
role = "decode"
vllm.kv_cache_gib = 0.25
"""
PROMPT, ANSWER_TOKENS = list(range(100, 260)), 12


def test_trace_has_both_vllm_workers_of_a_handoff(tmp_path):
    with an_otlp_collector(tmp_path) as collector:
        (tmp_path / "fleet.toml").write_text(TOPOLOGY.format(endpoint=f"http://127.0.0.1:{collector.grpc_port}"))
        with fleet_up(
            tmp_path, "--config", str(tmp_path / "fleet.toml"), engine="vllm", ready_seconds=READY_SECONDS
        ) as up:
            answer = httpx.post(
                f"{up.endpoints['http']}/v1/completions",
                json={"model": "tiny", "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "ignore_eos": True},
                headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-01"},
                timeout=120,
            )
            spans = collector.wait_for(TRACE_ID, "worker prefill", "worker decode", "text_completion tiny")

    assert answer.status_code == 200, answer.text
    by_id = {span.span_id: span for span in spans}
    (prefill,) = [span for span in spans if span.name == "worker prefill"]
    (decode,) = [span for span in spans if span.name == "worker decode"]
    assert {prefill.service, decode.service} == {"fleet-worker"}
    assert prefill.instance != decode.instance
    assert by_id[prefill.parent_id].name == "attempt prefill"
    assert by_id[decode.parent_id].name == "attempt decode"
    assert [name for name, _ in decode.events].count("kv_transfer") == 1, decode.events
    phases = {span.name: span for span in spans if span.parent_id == decode.span_id}
    assert {"prefill", "decode"} <= set(phases)
    assert decode.began <= phases["prefill"].began <= phases["decode"].began <= phases["decode"].ended <= decode.ended
