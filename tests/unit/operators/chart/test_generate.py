"""The generated parts of the chart are up to date, and no dashboard queries an unknown metric."""

import re
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from operators.chart.dashboards import DASHBOARDS, Queries
from operators.chart.generate import generated, main, rules, schema
from operators.chart.metric_catalogue import OPERATOR, ROUTER, STORE, by_name
from operators.chart.values import OWNED, Values
from operators.rbac import ACCESS, PLANNER_ACCESS

CHART = Path(__file__).parents[4] / "deploy" / "helm" / "fleet"
AGAIN = "run `python -m operators.chart.generate deploy/helm/fleet`"


@pytest.fixture(scope="module")
def made():
    return generated()


def test_chart_equals_the_generated_files(made):
    stale = [name for name, content in made.items() if (CHART / name).read_text() != content]

    assert not stale, f"{stale} are not what the types give: {AGAIN}"


@pytest.mark.parametrize(("options", "status"), [(["--help"], 0), ([], 2), (["--chart"], 2)])
def test_help_or_missing_folder_writes_no_files(options, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["helm_chart", *options])

    with pytest.raises(SystemExit, match=f"^{status}$"):
        main()

    assert list(tmp_path.iterdir()) == []


def test_chart_has_only_generated_definitions_and_dashboards(made):
    there = {
        str(path.relative_to(CHART)) for folder in ("files", "templates/crds") for path in (CHART / folder).rglob("*.*")
    }

    assert there <= set(made)


def test_values_file_has_the_defaults():
    assert msgspec.convert(yaml.safe_load((CHART / "values.yaml").read_text()), Values) == Values()


def test_every_value_is_documented_in_a_closed_schema():
    whole = schema()
    parts = whole["definitions"]

    assert all(part["additionalProperties"] is False for part in parts.values() if "properties" in part)
    assert "takes precedence over the tag" in parts["Image"]["properties"]["digest"]["description"]
    assert "max_queued" in parts["RouterSettings"]["properties"]
    assert not any(set(names) & set(parts[owner]["properties"]) for owner, names in OWNED.items())
    referenced = set(re.findall(r'"#/definitions/([^"]+)"', msgspec.json.encode(whole).decode()))
    assert referenced == set(parts)


@pytest.mark.parametrize("access", [ACCESS, PLANNER_ACCESS], ids=["operator", "planner"])
def test_roles_rules_allow_exactly_what_is_needed(access):
    for part, own in (("deployments", False), ("own", True)):
        granted = {
            (group, resource, verb)
            for rule in rules(access)[part]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        needed = {
            (each.group, each.resource, verb) for each in access if each.own_namespace is own for verb in each.verbs
        }
        assert granted == needed


NAMES = re.compile(r"\b(fleet|kvstore)_[a-z_]+")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.mark.parametrize(
    ("name", "catalogue"),
    [
        ("requests", ROUTER),
        ("kv-store", STORE),
        ("operator", OPERATOR),
    ],
)
def test_dashboards_query_existing_metrics_and_labels(name, catalogue):
    samples = {f"{each.name}{suffix}": each for each in catalogue for suffix in SUFFIXES[each.type]}
    made = DASHBOARDS[name]()
    targets = [target for panel in made["panels"] for target in panel.get("targets", ())]
    variables = [each["query"] for each in made["templating"]["list"]]

    assert len(targets) >= 10
    for text in (*(target["expr"] for target in targets), *variables):
        asked = [match.group() for match in NAMES.finditer(text)]
        assert all(each in samples for each in asked), text
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(",")}
        for each in asked:
            assert grouped <= {*samples[each].labels} | {"le", "pod"}, text


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap_and_have_unique_ids(name):
    panels = DASHBOARDS[name]()["panels"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


OWN = {
    "fleet_active_requests",
    "fleet_queued_requests",
    "fleet_worker_booked_prefill_tokens",
    "kvstore_tier_bytes",
    "kvstore_tier_capacity_bytes",
}
"""Gauges of which each process reports its own part, so that dashboards sum them."""


@pytest.mark.parametrize("name", DASHBOARDS)
def test_values_that_every_router_reports_are_not_summed(name):
    catalogue = by_name([*ROUTER, *STORE, *OPERATOR])
    texts = [target["expr"] for panel in DASHBOARDS[name]()["panels"] for target in panel.get("targets", ())]
    asked = [(each.group(), text) for text in texts for each in NAMES.finditer(text)]
    gauges = [(gauge, text) for gauge, text in asked if gauge in catalogue and catalogue[gauge].type == "gauge"]

    assert gauges
    for gauge, text in gauges:
        once = f"max without (instance, pod, router) ({gauge}{{" in text
        by_process = "by (pod)" in text or text.startswith("avg ")
        assert [once, by_process, gauge in OWN].count(True) == 1, text


def test_query_for_unknown_metric_or_label_is_refused():
    of = Queries(ROUTER)

    with pytest.raises(LookupError, match="fleet_requets: there is no such counter"):
        of.rate("fleet_requets")
    with pytest.raises(LookupError, match="fleet_requests: there is no such gauge"):
        of.level("fleet_requests")
    with pytest.raises(LookupError, match="fleet_requests: has no label worker"):
        of.rate("fleet_requests", "worker")
