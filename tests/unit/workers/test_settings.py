"""What a worker refuses to be told."""

import msgspec
import pytest

from fleet.roles import Role
from workers.settings import WorkerSettings

MINIMAL = {"worker_id": "w1", "model": "tiny"}


def test_a_name_and_a_model_are_enough():
    settings = msgspec.convert(MINIMAL, WorkerSettings)

    assert settings.role is Role.BOTH
    assert settings.block_tokens == 32


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"model": ""}, "model"),
        ({"engine": ""}, "engine"),
        ({"role": "cook"}, "role"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"kv_paths": ["store"]}, "kv_paths"),
        ({"kv_paths": ["direct", "direct"]}, "kv_paths"),
        ({"role": "prefill"}, "kv_paths"),
        ({"heartbeat_ms": 50}, "heartbeat_ms"),
        ({"unknown": 1}, "unknown"),
        ({"vllm": {"omp_threads": 0}}, "$.vllm.omp_threads"),
        ({"simulated": {"speedup": 0}}, "$.simulated.speedup"),
        ({"simulated": {"bytes_per_token": 12}}, "bytes_per_token"),
        ({"simulated": {"eos_token_ids": [5000]}}, "eos_token_ids"),
        ({"simulated": {"vocab_size": 2, "eos_token_ids": [0, 1]}}, "eos_token_ids"),
        ({"simulated": {"latency": {"step_base_ms": -1}}}, "$.simulated.latency.step_base_ms"),
    ],
)
def test_a_setting_that_cannot_be_obeyed_is_refused_by_name(fields, named):
    with pytest.raises(msgspec.ValidationError, match=named.replace("$", r"\$")):
        msgspec.convert({**MINIMAL, **fields}, WorkerSettings)
