"""Processes that start name the ports at which other hosts have to prove nothing."""

import pytest

from tests.support.fleet_processes import start_service

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_processes_warn_of_exactly_their_open_ports(tmp_path, model_dir, host):
    router = {"http_listen": f"{host}:0", "grpc_listen": "127.0.0.1:0", "endpoint_picker": {"host": host, "port": 0}}
    worker = {
        "worker_id": "w",
        "engine": "simulated",
        "model": "tiny",
        "model_dir": str(model_dir),
        "kv_paths": ["direct"],
        "simulated": {"direct_listen": f"{host}:0"},
    }
    logged = ""
    for part, settings in (("router", router), ("worker", worker)):
        log = tmp_path / f"{part}.log"
        with log.open("w") as output:
            process, endpoints = start_service(part, settings, tmp_path / f"{part}.json", stdout=output, stderr=output)
        process.terminate()
        process.wait(60)
        assert endpoints, log.read_text()
        logged += log.read_text()

    warnings = [line for line in logged.splitlines() if "port open to other hosts" in line]
    expected = ["http_listen", "endpoint_picker.host", "simulated.direct_listen"] if host == "0.0.0.0" else []
    assert len(warnings) == len(expected)
    assert all(setting in line for setting, line in zip(expected, warnings, strict=True))
