"""Tests of the settings of a planner: a bad address, URL or period is refused with the name of its field."""

import msgspec
import pytest

from fleet.config import build_settings
from fleet.core.errors import ConfigurationRefused
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.settings import (
    EtcdElectionSettings,
    EtcdTarget,
    LinearEngineSettings,
    LoadRuleSettings,
    MetricsDemandSettings,
    PlannerSettings,
    PrometheusDemandSettings,
    RouterDemandSettings,
)


@pytest.mark.parametrize(
    ("kind", "field"),
    [(RouterDemandSettings, "addresses"), (EtcdElectionSettings, "endpoints"), (EtcdTarget, "endpoints")],
)
@pytest.mark.parametrize(
    "address", ["router-0", "router-0:", "router-0:99999", ":50052", "http://router-0:50052", "router-0/x:50052"]
)
def test_malformed_address_is_refused(kind, field, address):
    with pytest.raises(ConfigurationRefused, match=f"^{field}: '{address}' is neither"):
        build_settings(kind, **{field: ("router-1:50052", address)})


def test_router_may_be_reached_over_a_unix_socket():
    settings = build_settings(RouterDemandSettings, addresses=("unix:/run/control.sock", "[::1]:50052"))

    assert settings.addresses == ("unix:/run/control.sock", "[::1]:50052")


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (LoadRuleSettings, {"interval_seconds": 1e-9}, "interval_seconds"),
        (PlannerRuleSettings, {"interval_seconds": 1e-9}, "interval_seconds"),
        (MetricsDemandSettings, {"urls": ["http://r/metrics"], "every_seconds": 1e-9}, "every_seconds"),
        (MetricsDemandSettings, {"urls": ["http://r/metrics"], "every_seconds": 20}, "stale_seconds"),
        (MetricsDemandSettings, {"urls": ["http://r/metrics", "http://r..svc:8000/metrics"]}, "urls\\[1\\]"),
        (MetricsDemandSettings, {"urls": [f"http://{'a' * 64}/metrics"]}, "a valid host"),
        (MetricsDemandSettings, {"urls": ["http://r:99999/metrics"]}, "urls"),
        (MetricsDemandSettings, {"urls": ["router:8000"]}, "must be http://host:port"),
        (PrometheusDemandSettings, {"url": "http://p..svc:9090"}, "url"),
        (PlannerRuleSettings, {"step_seconds": 1e-310}, "step_seconds"),
        (LinearEngineSettings, {"speedup": 1e300}, "speedup"),
        (LinearEngineSettings, {"latency": {"prefill_ms_per_token": 1e300}}, "prefill_ms_per_token"),
    ],
)
def test_period_that_cannot_work_is_refused_by_field(kind, fields, field):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(fields, kind)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            MetricsDemandSettings,
            {"urls": ["http://r", "http://me:secret@r"]},
            "urls[1]: must hold no user name and no password; use key_file",
        ),
        (
            PrometheusDemandSettings,
            {"url": "http://:secret@host:port"},
            "url: must hold no user name and no password; use token_file",
        ),
        (
            PrometheusDemandSettings,
            {"url": "me:secret@host:9090"},
            "url: must hold no user name and no password; use token_file",
        ),
        (
            PrometheusDemandSettings,
            {"url": "http://me:sec/secret@host"},
            "url: must hold no user name and no password; use token_file",
        ),
        (
            PrometheusDemandSettings,
            {"url": "http://[:secret@host"},
            "url: must hold no user name and no password; use token_file",
        ),
    ],
)
def test_refusal_of_a_url_does_not_show_its_password(kind, fields, message):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(fields, kind)

    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_gpu_engine_needs_the_gpu_of_its_pool():
    fields = {
        "model": "m",
        "goals": {"ttft_seconds": 1, "tpot_seconds": 0.1},
        "pools": [{"name": "both", "role": "both"}],
        "engines": {"both": {"kind": "gpu", "model": "m"}},
        "source": {"kind": "routers", "addresses": ["unix:/x"]},
        "target": {"kind": "folder", "folder": "x"},
    }

    with pytest.raises(
        msgspec.ValidationError, match=r'pools\[0\]\.gpu: is needed, because engines\.both is of kind "gpu"'
    ):
        msgspec.convert(fields, PlannerSettings)

    fields["pools"][0]["gpu"] = "h100"
    assert msgspec.convert(fields, PlannerSettings).pools[0].gpu == "h100"


def planner(**changes):
    bounds = {"gpu": "h100", "most": 3}
    given = {
        "model": "m",
        "goals": {"ttft_seconds": 1.0, "tpot_seconds": 0.1},
        "pools": [{"name": "p", "role": "prefill", **bounds}, {"name": "d", "role": "decode", **bounds}],
        "rule": {"kind": "load", "requests_per_replica": 4},
        "source": {"kind": "routers", "addresses": ["unix:/x"]},
        "target": {"kind": "folder", "folder": "x"},
    }
    return msgspec.convert(given | changes, PlannerSettings)


def test_gpus_of_a_pool_must_be_those_of_its_engine():
    engine = {"kind": "gpu", "model": "m", "tp": 4, "pp": 2, "dp": 2, "ep": 8}
    with pytest.raises(msgspec.ValidationError) as refused:
        planner(engines={"d": engine})
    assert "pools[1].gpus: 1 differs from tp x pp x dp of engines.d, which is 4 x 2 x 2 = 16" in str(refused.value)

    pool = {"name": "d", "role": "decode", "gpu": "h100", "gpus": 16}
    assert planner(pools=[pool], engines={"d": engine}).pools[0].replica_gpus == 16
    assert planner(engines={"d": engine | {"tp": 1, "pp": 1, "dp": 1}}).pools[1].replica_gpus == 1


def test_budget_may_equal_the_price_of_the_floors():
    """In floating point, three times 2.49 is more than 7.47."""
    pool = {"name": "d", "role": "decode", "least": 3, "dollars_per_hour": 2.49}
    assert planner(pools=[pool], budget={"dollars_per_hour": 7.47}).budget.dollars_per_hour == 7.47
    with pytest.raises(msgspec.ValidationError, match=r"budget.dollars_per_hour: 7.46 is below what the floors"):
        planner(pools=[pool], budget={"dollars_per_hour": 7.46})


@pytest.mark.parametrize("field", ["least_ratio", "most_ratio"])
def test_ratio_is_refused_with_the_rule_load(field):
    with pytest.raises(msgspec.ValidationError, match=f"budget.{field}: the rule `load` keeps no ratio"):
        planner(budget={field: 0.5})

    engines = {name: {"kind": "linear"} for name in "pd"}
    assert getattr(planner(budget={field: 0.5}, rule={"kind": "fleet"}, engines=engines).budget, field) == 0.5


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "ftp://x",
        "http://127.0.0.1:99999",
        "http://",
        "http://r:0",
        "http://:9090",
        "http://[::1",
        "http://a b",
    ],
)
def test_url_that_nothing_can_be_sent_to_is_refused(url):
    for kind, fields, field in (
        (MetricsDemandSettings, {"urls": ["http://r:8000/metrics", url]}, "urls[1]"),
        (PrometheusDemandSettings, {"url": url}, "url"),
    ):
        with pytest.raises(msgspec.ValidationError) as refused:
            msgspec.convert(fields, kind)
        assert f"{field}: {url!r} must be http://host:port" in str(refused.value)


@pytest.mark.parametrize("url", ["http://r", "https://prometheus.example:9090/base/", "HTTP://[::1]:9090/api"])
def test_urls_with_host_and_optional_port_are_accepted(url):
    assert msgspec.convert({"urls": [url]}, MetricsDemandSettings).urls == (url,)
    assert msgspec.convert({"url": url}, PrometheusDemandSettings).url == url


def test_energy_needs_the_power_of_each_pool():
    rule = {"kind": "fleet", "settings": {"minimise": "energy"}}
    engines = {name: {"kind": "linear"} for name in ("p", "d")}
    bare = [{"name": "p", "role": "prefill", "gpu": "h100"}, {"name": "d", "role": "decode"}]
    with pytest.raises(msgspec.ValidationError) as refused:
        planner(pools=bare, engines=engines, rule=rule)
    assert 'pools[1].watts: is needed, because the rule minimises "energy" and d has no known `gpu`' in str(
        refused.value
    )

    bare[1]["watts"] = 250
    assert planner(pools=bare, engines=engines, rule=rule).pools[1].replica_watts == 250
