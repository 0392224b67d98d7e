"""Open ports: a process warns at its start of ports at which other hosts need no credentials; docs/security.md lists all ports."""

import re
from pathlib import Path

import msgspec
import pytest

from fleet.app.settings_reference import KINDS, settings_keys
from fleet.router.settings.open_ports import IN_THE_CLEAR, open_router_ports
from fleet.router.settings.router import RouterSettings
from kvstore.security.open_ports import NO_CREDENTIALS, warn_of_open_ports
from workers.connections.open_ports import open_worker_ports
from workers.settings import WorkerSettings

TLS = {"certificate": "/c.pem", "key": "/k.pem"}
MUTUAL = TLS | {"client_authority": "/a.pem"}
EVERYWHERE = {"http_listen": "0.0.0.0:8000", "grpc_listen": "[::]:50051", "kserve_listen": "10.0.0.1:8001"}


def router_ports(*, keyed=False, **settings):
    found = open_router_ports(msgspec.convert(settings, RouterSettings), keyed=keyed)
    return {port.setting: port.cause for port in found if port.is_reached_by_others}


def worker_ports(**settings):
    told = {"worker_id": "w", "engine": "simulated", "model": "tiny", "model_dir": "/m"} | settings
    found = open_worker_ports(msgspec.convert(told, WorkerSettings))
    return [(port.setting, port.address) for port in found if port.is_reached_by_others]


@pytest.mark.parametrize(
    ("tls", "keyed", "cause"),
    [
        ({}, False, NO_CREDENTIALS),
        (TLS, False, NO_CREDENTIALS),
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
def test_picker_is_open_until_gateways_show_certificates(tls, is_open):
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
    ],
)
def test_ports_between_engines_are_open_beyond_loopback(settings, found):
    assert [setting for setting, _ in worker_ports(**settings)] == found


@pytest.mark.parametrize(
    ("settings", "side_channel"),
    [
        ({}, None),
        ({"listen": "unix:/w"}, None),
        ({"listen": "[::1]:1"}, None),
        ({"listen": "0.0.0.0:1", "advertise": "gpu-1:1"}, "gpu-1"),
        ({"listen": "10.0.0.2:1"}, "10.0.0.2"),
        ({"listen": "[fd00::2]:1"}, "[fd00::2]"),
    ],
)
def test_direct_handoff_of_vllm_opens_ports_of_ucx_and_nixl(settings, side_channel):
    expected = [("kv_paths", "the ports that UCX opens")]
    if side_channel:
        expected.append(("kv_paths", f"the side channel of NIXL at {side_channel}, a free port"))

    assert worker_ports(engine="vllm", kv_paths=["direct"], **settings) == expected
    assert worker_ports(engine="vllm", **settings) == []


def test_each_open_port_is_logged_with_its_remedy(caplog):
    settings = msgspec.convert({"http_listen": "0.0.0.0:8000"}, RouterSettings)
    warn_of_open_ports(open_router_ports(settings, keyed=False))

    (record,) = [each for each in caplog.records if each.message == "port open to other hosts"]
    assert (record.setting, record.address, record.cause) == ("http_listen", "0.0.0.0:8000", NO_CREDENTIALS)
    assert "API keys" in record.remedy


PAGE = Path(__file__).parents[3] / "docs" / "security.md"
PARTS = {"store": "kvstore", "topology": "up"}
"""Names in the tables of ports that differ from those in `KINDS`, with the name in `KINDS`."""

NESTED = ("embedded_store.", "router.", "pools.simulated.")
"""Sections that have the same ports as the settings file of another process."""

NO_PORTS = {"share_ports", "endpoint_picker.target_port"}
"""Keys that have a name like a port setting, but open no port."""


def keys_of(part):
    """Return the keys of a settings file by their paths, without the `[]` of arrays."""
    return {key.path.replace("[]", ""): key for key in settings_keys(KINDS[part])}


def stated_default(key):
    """Return the default of a key in the words that docs/security.md uses."""
    if key.default == "none":
        if re.search("mpty: a (Unix )?socket", key.meaning):
            return "a Unix socket of the user"
        return "any free ports" if "empty: any free ports" in key.meaning else "off"
    address = key.default.strip('"')
    return f"{address.removesuffix(':0')}, any free port" if address.endswith(":0") else address


def rows_of_ports():
    """Return by part and key the default that the tables of ports in docs/security.md state."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5:  # the tables of ports have five columns
            for part, key, default in re.findall(r"([\w-]+) `([\w.]+)` \(([^);]+)", cells[1]):
                rows[PARTS.get(part, part), key] = default
    return rows


def test_each_row_of_ports_tables_names_a_key_and_its_default():
    rows = rows_of_ports()

    assert rows
    for (part, path), default in rows.items():
        assert path in keys_of(part), f"docs/security.md: {part} has no key {path}"
        stated = stated_default(keys_of(part)[path])
        assert default.split(":")[0] == stated if stated == "auto" else default == stated, f"{part} {path}: {stated}"


def test_each_setting_that_opens_a_port_has_a_row():
    opening = {
        (part, path)
        for part in KINDS
        for path in keys_of(part)
        if re.search(r"(^|[._])(listen|socket|ports?|host|nixl)$", path)
        and path not in NO_PORTS
        and not path.startswith(NESTED)
    }

    assert opening == rows_of_ports().keys()
