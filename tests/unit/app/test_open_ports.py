"""Open ports: a process warns at its start of each port at which other hosts have to prove nothing."""

import msgspec
import pytest

from fleet.app.open_ports import (
    IN_THE_CLEAR,
    NOTHING_PROVEN,
    open_router_ports,
    open_worker_ports,
    warn_of_open_ports,
)
from fleet.router.settings.router import RouterSettings
from workers.settings import WorkerSettings

TLS = {"certificate": "/c.pem", "key": "/k.pem"}
MUTUAL = TLS | {"client_authority": "/a.pem"}
EVERYWHERE = {"http_listen": "0.0.0.0:8000", "grpc_listen": "[::]:50051", "kserve_listen": "10.0.0.1:8001"}


def router_ports(*, keyed=False, **settings):
    found = open_router_ports(msgspec.convert(settings, RouterSettings), keyed=keyed)
    return {port.setting: port.cause for port in found}


@pytest.mark.parametrize(
    ("tls", "keyed", "cause"),
    [
        ({}, False, NOTHING_PROVEN),
        (TLS, False, NOTHING_PROVEN),
        ({}, True, IN_THE_CLEAR),
        (TLS, True, None),
        (MUTUAL, False, None),
    ],
)
def test_client_port_without_key_or_tls_is_open_to_other_hosts(tls, keyed, cause):
    expected = dict.fromkeys(EVERYWHERE, cause) if cause else {}
    assert router_ports(keyed=keyed, tls=tls, **EVERYWHERE) == expected


def test_router_on_loopback_has_no_open_ports():
    assert router_ports(kserve_listen="[::1]:8001", endpoint_picker={"host": "127.0.0.1"}) == {}


@pytest.mark.parametrize(
    ("tls", "is_open"),
    [({}, True), (TLS | {"endpoint_picker": True}, True), (MUTUAL, True), (MUTUAL | {"endpoint_picker": True}, False)],
)
def test_endpoint_picker_is_open_until_gateways_show_certificates(tls, is_open):
    assert ("endpoint_picker.host" in router_ports(keyed=True, tls=tls, endpoint_picker={})) == is_open


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"group": {"nodes": 2, "leader": "10.0.0.1:5000"}}, ["group.leader"]),
        ({"group": {"nodes": 2, "leader": "10.0.0.1:5000", "listen": "0.0.0.0:5000"}}, ["group.listen"]),
        ({"group": {"nodes": 2, "leader": "10.0.0.1:5000", "rank": 1}}, []),
        ({"group": {"nodes": 2, "leader": "127.0.0.1:5000"}}, []),
        ({"kv_paths": ["direct"]}, []),
        ({"kv_paths": ["direct"], "simulated": {"direct_listen": "0.0.0.0:0"}}, ["simulated.direct_listen"]),
        ({"simulated": {"direct_listen": "0.0.0.0:0"}}, []),
        ({"kv_paths": ["direct"], "engine": "vllm"}, []),
        ({"kv_paths": ["direct"], "engine": "vllm", "listen": "unix:/w"}, []),
        ({"kv_paths": ["direct"], "engine": "vllm", "listen": "0.0.0.0:1", "advertise": "gpu-1:1"}, ["advertise"]),
        ({"kv_paths": ["direct"], "engine": "vllm", "listen": "10.0.0.2:1"}, ["listen"]),
    ],
)
def test_ports_between_engines_are_open_beyond_loopback(settings, found):
    told = {"worker_id": "w", "engine": "simulated", "model": "tiny", "model_dir": "/m"} | settings
    assert [port.setting for port in open_worker_ports(msgspec.convert(told, WorkerSettings))] == found


def test_each_open_port_is_logged_with_its_remedy(caplog):
    settings = msgspec.convert({"http_listen": "0.0.0.0:8000"}, RouterSettings)
    warn_of_open_ports(open_router_ports(settings, keyed=False))

    (record,) = [each for each in caplog.records if each.message == "port open to other hosts"]
    assert (record.setting, record.address, record.cause) == ("http_listen", "0.0.0.0:8000", NOTHING_PROVEN)
    assert "API keys" in record.to_change
