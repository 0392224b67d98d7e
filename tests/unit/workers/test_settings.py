"""Worker settings: invalid ones are refused."""

import msgspec
import pytest

from fleet.core.roles import Role
from workers.settings import WorkerSettings

MINIMAL = {"worker_id": "w1", "model": "tiny"}
NODE = {"store_id": "s", "listen": ["127.0.0.1:0", "unix:/run/kv"], "shm_socket": "/run/pool"}


def test_worker_id_and_model_are_enough():
    settings = msgspec.convert(MINIMAL, WorkerSettings)

    assert settings.role is Role.BOTH
    assert settings.block_tokens == 32


def test_embedded_store_is_used_by_its_unix_socket():
    settings = msgspec.convert({**MINIMAL, "embedded_store": NODE, "kv_paths": ["store"]}, WorkerSettings)

    assert settings.store_address == "unix:/run/kv"
    assert msgspec.convert({**MINIMAL, "store": "h:1"}, WorkerSettings).store_address == "h:1"
    assert msgspec.convert(MINIMAL, WorkerSettings).store_address == ""


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
        ({"store": "unix:/s", "embedded_store": NODE}, "embedded_store: `store` names another node"),
        ({"embedded_store": {**NODE, "listen": ["127.0.0.1:0"]}}, "embedded_store.listen: needs a unix: address"),
        ({"embedded_store": NODE, "listen": "unix:/run/kv"}, "listen: /run/kv is a socket of `embedded_store`"),
        ({"embedded_store": NODE, "control_listen": "unix:/run/pool"}, "control_listen: /run/pool is a socket of"),
        (
            {"control_listen": "0.0.0.0:0"},
            "control_listen: any caller of 0.0.0.0:0 could end the worker: set control_cred",
        ),
        ({"control_listen": "127.0.0.1:0"}, "control_listen: any caller of 127.0.0.1:0 could end the worker"),
        ({"control_listen": "h:1", "control_credentials": {"authority": "a"}}, "control_listen: any caller of h:1"),
        ({"embedded_store": {**NODE, "capacity_bytes": 0}}, "$.embedded_store.capacity_bytes"),
        ({"embedded_store": {**NODE, "tier": []}}, "tier"),
        ({"kv_paths": ["direct", "direct"]}, "kv_paths"),
        ({"task": "paint"}, "$.task"),
        ({"task": "embed", "role": "decode"}, "role: decode is for models that generate"),
        ({"task": "embed", "kv_paths": ["direct"]}, "kv_paths: a worker with the task embed"),
        ({"task": "classify", "store": "h:1"}, "store: a worker with the task classify"),
        ({"task": "classify", "embedded_store": NODE}, "embedded_store: a worker with the task classify"),
        ({"task": "embed", "adapters": {"ada": "/ada"}}, "adapters: a worker with the task embed"),
        ({"role": "prefill"}, "kv_paths"),
        ({"heartbeat_ms": 50}, "heartbeat_ms"),
        ({"unknown": 1}, "unknown"),
        ({"adapters": {"": "/adapters/a"}}, "adapters"),
        ({"adapters": {MINIMAL["model"]: "/adapters/a"}}, "adapters"),
        ({"adapter_slots": 0}, "$.adapter_slots"),
        ({"group": {"nodes": 2, "rank": 2, "leader": "h:1"}}, "rank: 2 is not below the number of nodes, 2"),
        ({"group": {"nodes": 2, "leader": "h"}}, "leader: 'h' is neither"),
        ({"group": {"nodes": 2, "leader": "h:1", "listen": "unix:/s"}}, "listen: 'unix:/s' is neither"),
        ({"group": {"nodes": 2, "leader": "h:1", "engine_ports": [5, 5]}}, "engine_ports: give two different ports"),
        ({"vllm": {"omp_threads": 0}}, "$.vllm.omp_threads"),
        ({"simulated": {"speedup": 0}}, "$.simulated.speedup"),
        ({"simulated": {"bytes_per_token": 12}}, "bytes_per_token"),
        ({"simulated": {"eos_token_ids": [5000]}}, "eos_token_ids"),
        ({"simulated": {"vocab_size": 2, "eos_token_ids": [0, 1]}}, "eos_token_ids"),
        ({"simulated": {"latency": {"step_base_ms": -1}}}, "$.simulated.latency.step_base_ms"),
    ],
)
def test_impossible_setting_is_refused_by_name(fields, named):
    with pytest.raises(msgspec.ValidationError, match=named.replace("$", r"\$")):
        msgspec.convert({**MINIMAL, **fields}, WorkerSettings)


@pytest.mark.parametrize(
    "fields",
    [
        {"control_listen": "unix:/run/w"},
        {"control_listen": "h:1", "control_credentials": {"secret_file": "/s"}},
        {"control_listen": "h:1", "control_credentials": {"certificate": "c", "key": "k", "authority": "a"}},
        {"control_listen": "h:1", "control_credentials": {"insecure": True}},
        {"control_listen": "h:1", "registry_credentials": {"secret_file": "/s"}},
        {"control_listen": "h:1", "group": {"nodes": 2, "rank": 1, "leader": "h:2"}},
    ],
    ids=["socket", "secret", "certificates", "insecure", "the registry's", "health alone"],
)
def test_protected_control_port_is_accepted(fields):
    settings = msgspec.convert({**MINIMAL, **fields}, WorkerSettings)

    assert settings.control_listen


def test_control_port_prefers_its_own_credentials():
    both = {"registry_credentials": {"secret_file": "/theirs"}, "control_credentials": {"secret_file": "/own"}}

    assert msgspec.convert({**MINIMAL, **both}, WorkerSettings).control_proof.secret_file == "/own"
