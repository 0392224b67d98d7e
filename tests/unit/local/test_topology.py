"""Topology of `fleet up`: the addresses that it reserves for its router and for metrics, and those of its endpoint picker."""

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.local.settings import ClusterSection, Topology
from fleet.local.topology import claim_address, plan
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.images import ImageSettings
from fleet.router.settings.router import RouterSettings
from tests.support.servers.processes import free_ports


def test_a_host_that_does_not_resolve_is_refused_in_words():
    with ExitStack() as held, pytest.raises(ConfigurationRefused) as refused:
        claim_address("router.http_listen", "nosuch.invalid:0", held)

    assert str(refused.value).startswith("router.http_listen: nosuch.invalid:0: ")
    assert "Unknown error" not in str(refused.value)


def test_port_for_0_is_none_that_connections_of_others_take():
    ephemeral = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    with ExitStack() as held:
        chosen = [claim_address("router.http_listen", "127.0.0.1:0", held) for _ in range(50)]

    ports = {int(address.rpartition(":")[2]) for address in chosen}
    assert len(ports) == 50
    assert ephemeral.start <= 20_000 or not ports & set(ephemeral)


@pytest.mark.parametrize(
    ("host", "picker", "expected"),
    [
        ("127.0.0.1", {}, "127.0.0.1:{port}"),
        ("127.0.0.1", {"router_endpoint": "10.0.0.1:80"}, "10.0.0.1:80"),
        ("0.0.0.0", {"router_endpoint": "10.0.0.1:80"}, "10.0.0.1:80"),
        ("127.0.0.1", {"target_port": 8000}, ""),
    ],
)
def test_picker_names_the_router_unless_told_otherwise(tmp_path, model_dir, host, picker, expected):
    made = planned_with_picker(tmp_path, model_dir, host, **picker)

    settings = msgspec.json.decode((tmp_path / "router.json").read_bytes(), type=RouterSettings)
    port = made.http.rpartition(":")[2]
    assert settings.endpoint_picker.router_endpoint == expected.format(port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "localhost"])
def test_picker_whose_gateways_cannot_find_the_router_is_refused(tmp_path, model_dir, host):
    with pytest.raises(ConfigurationRefused, match=r"^router\.endpoint_picker\.router_endpoint: is needed"):
        planned_with_picker(tmp_path, model_dir, host)


def planned_with_picker(tmp_path, model_dir, host, **picker):
    """Return the plan of a cluster whose router listens at `host` and has an endpoint picker with these settings."""
    router = RouterSettings(
        http_listen=f"{host}:0", grpc_listen="127.0.0.1:0", endpoint_picker=EndpointPickerSettings(**picker)
    )
    topology = Topology(cluster=ClusterSection(engine="simulated"), router=router)
    return plan(topology, folder=tmp_path, model_dir=model_dir, model=ModelName("tiny"))


MOST = 4
"""Maximum number of workers of the clusters that `planned` plans."""


def planned(tmp_path, first, *, second="", store="", kv_paths=("store",)):
    """Return the settings files of a topology with two pools; the first pool has two workers and the metrics address `first`."""
    (tmp_path / "config.json").write_text("{}")
    topology = {
        "cluster": {"engine": "simulated", "most_workers": MOST, "kv_paths": kv_paths},
        "router": {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"},
        "pools": [
            {"role": "decode", "replicas": 2, "metrics_listen": first},
            {"role": "prefill", "metrics_listen": second},
        ],
        "store": {"metrics_listen": store},
        "metrics_access": {"key_sha256": ["0" * 64]},
        "metrics_tls": {"certificate": "/c.pem", "key": "/k.pem"},
    }
    made = plan(msgspec.convert(topology, Topology), folder=tmp_path, model_dir=tmp_path, model="m")
    names = [process.child.name for process in made.processes]
    return {name: msgspec.json.decode((tmp_path / f"{name}.json").read_bytes()) for name in names}


def test_workers_of_a_pool_have_metrics_at_consecutive_ports(tmp_path):
    store, first, *_ = free_ports(1 + MOST)
    settings = planned(tmp_path, f"127.0.0.1:{first}", store=f"127.0.0.1:{store}")
    assert {name: each["metrics_listen"] for name, each in settings.items() if each.get("metrics_listen")} == {
        "kvstore": f"127.0.0.1:{store}",
        "decode-0": f"127.0.0.1:{first}",
        "decode-1": f"127.0.0.1:{first + 1}",
    }
    for name in ("kvstore", "decode-0", "decode-1", "prefill-0"):
        assert settings[name]["metrics_access"]["key_sha256"] == ["0" * 64]
        assert settings[name]["metrics_tls"]["certificate"] == "/c.pem"


def test_ports_for_metrics_that_cannot_be_used_are_refused(tmp_path):
    most = 65_535 - MOST + 1
    for fields, told in (
        ({"first": "127.0.0.1:0"}, "pools[0].metrics_listen: 127.0.0.1:0 does not name the port"),
        (
            {"first": f"127.0.0.1:{most + 1}"},
            f"pools[0].metrics_listen: 127.0.0.1:{most + 1} is the first of {MOST} ports",
        ),
    ):
        with pytest.raises(ConfigurationRefused) as refused:
            planned(tmp_path, **fields)
        assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("fields", "where"), [({"first": "127.0.0.1:65536"}, "pools[0]"), ({"first": "", "store": "here"}, "store")]
)
def test_settings_refuse_addresses_for_metrics_of_another_form(tmp_path, fields, where):
    with pytest.raises(msgspec.ValidationError, match=rf"metrics_listen: .* is not host:port .*\$\.{re.escape(where)}"):
        planned(tmp_path, **fields)


def test_pools_that_cannot_grow_within_their_ports_are_refused(tmp_path):
    first, *_, last = free_ports(MOST)
    for fields, other in (
        ({"second": f"127.0.0.1:{last}"}, f"pools[0].metrics_listen uses port {last}"),
        ({"second": f"0.0.0.0:{last}"}, f"pools[0].metrics_listen uses port {last}"),
        ({"store": f"127.0.0.1:{last}"}, f"store.metrics_listen uses port {last}"),
    ):
        with pytest.raises(ConfigurationRefused, match=rf"{re.escape(other)} too; .*cluster\.most_workers") as refused:
            planned(tmp_path, f"127.0.0.1:{first}", **fields)
        index = int("second" in fields)
        assert str(refused.value).startswith(f"pools[{index}].metrics_listen: ")


def test_pools_at_different_hosts_may_have_equal_ports(tmp_path):
    first = free_ports(MOST)[0]
    settings = planned(tmp_path, f"127.0.0.1:{first}", second=f"127.0.0.2:{first}")
    assert settings["prefill-0"]["metrics_listen"] == f"127.0.0.2:{first}"


def test_port_for_metrics_that_is_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationRefused, match=rf"^pools\[0\]\.metrics_listen: 127\.0\.0\.1:{port} is in use"):
            planned(tmp_path, f"127.0.0.1:{port}")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_bad_authority_for_images_is_named_by_its_path(tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    images = ImageSettings(fetch_urls=True, authority=str(file))
    topology = Topology(cluster=ClusterSection(engine="simulated"), router=RouterSettings(images=images))

    with pytest.raises(ConfigurationRefused, match=rf"^router\.images\.authority: {re.escape(str(file))}: "):
        plan(topology, folder=tmp_path, model_dir=tmp_path, model=ModelName("m"))


def test_metrics_of_a_store_that_is_not_there_are_refused(tmp_path):
    port = free_ports(1)[0]
    with pytest.raises(ConfigurationRefused, match=r"^store\.metrics_listen: this cluster has no store"):
        planned(tmp_path, "", store=f"127.0.0.1:{port}", kv_paths=("direct",))
