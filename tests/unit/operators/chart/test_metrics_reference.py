"""Tests of the generated page of all metrics, and of the metric names in documents and dashboards."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from kvstore.metric_definitions import HistogramDefinition, MetricDefinition
from operators.chart.metric_catalogue import PROCESSES
from operators.chart.metrics_reference import reference
from tests.support.source_rules import DEFINES_METRICS, complaints, source_files

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "metrics.md"
DEFINES = re.compile(r"\b(Counter|Gauge|Histogram)Definition\(")
METRIC = re.compile(
    r"`((?:fleet|kvstore|gen_ai)_[a-z_]+)(?:\{[^`]*)?`|\b((?:fleet|kvstore|gen_ai)_[a-z_]+)(?=[{\[]|_bucket)"
)
"""A metric name in backquotes, or before a bracket of a query."""

OTHER_NAMES = frozenset({"fleet_prompt_tokens_waiting"})
"""Names that look like metric names of Fleet, but are none: the rules of prometheus-adapter define this one."""


def exported_names() -> set[str]:
    """Return the names of all exported samples, and those of counters also without `_total`."""
    names: set[str] = set()
    for each in (each for definitions in PROCESSES.values() for each in definitions):
        names |= {each.name, each.exported_name}
        if isinstance(each, HistogramDefinition):
            names |= {f"{each.name}{end}" for end in ("_bucket", "_sum", "_count")}
    return names


def definitions_in(value: object) -> list[MetricDefinition]:
    match value:
        case MetricDefinition():
            return [value]
        case dict():
            return [found for each in value.values() for found in definitions_in(each)]
        case list() | tuple():
            return [found for each in value for found in definitions_in(each)]
        case _:
            return []


def test_page_of_metrics_is_what_the_code_exports():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_every_definition_of_the_product_is_in_the_catalogue():
    known = {each.name for definitions in PROCESSES.values() for each in definitions}
    defined: dict[str, str] = {}
    for file in source_files():
        if (
            file.parts[0] in ("tests", "loadtests")
            or file == DEFINES_METRICS
            or not DEFINES.search(file.read_text(encoding="utf-8"))
        ):
            continue
        module = importlib.import_module(".".join(file.with_suffix("").parts))
        found = [each.name for value in vars(module).values() for each in definitions_in(value)]
        assert found, file
        defined |= dict.fromkeys(found, str(file))
    assert {name: file for name, file in defined.items() if name not in known} == {}
    assert known == set(defined)


@pytest.mark.parametrize("part", PROCESSES)
def test_names_of_a_process_are_unique_and_well_formed(part):
    names = [each.name for each in PROCESSES[part]]
    assert len(names) == len(set(names))
    for each in PROCESSES[part]:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", each.name)
        assert not each.name.endswith("_total")
        assert each.meaning
        assert not each.meaning.endswith(".")
        assert "le" not in each.labels


def test_histograms_of_durations_reach_600_s_in_every_process():
    histograms = [
        each
        for definitions in PROCESSES.values()
        for each in definitions
        if isinstance(each, HistogramDefinition) and each.shown_unit == "seconds"
    ]
    assert {each.name for each in histograms} >= {"fleet_ttft_seconds", "kvstore_tier_operation_seconds"}
    assert {each.name: each.bounds for each in histograms if each.bounds[-1] < 600} == {}
    assert {each.name: each.bounds for each in histograms if list(each.bounds) != sorted(set(each.bounds))} == {}


def test_pages_rules_and_dashboards_name_existing_metrics():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "docs", "deploy", "README.md"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    labels = {label for definitions in PROCESSES.values() for each in definitions for label in each.labels}
    known, unknown = exported_names() | labels | OTHER_NAMES, {}
    asked = 0
    for name in listed.stdout.split("\0"):
        if not name.endswith((".md", ".yaml", ".json", ".txt")) or "/adr/" in name:
            continue
        for match in METRIC.finditer((ROOT / name).read_text(encoding="utf-8")):
            asked += 1
            if (metric := match.group(1) or match.group(2)) not in known:
                unknown[metric] = name
    assert unknown == {}
    assert asked > 200


@pytest.mark.parametrize(
    "line",
    [
        "from prometheus_client import Gauge",
        "from prometheus_client.core import CounterMetricFamily",
        "import prometheus_client",
    ],
)
def test_source_rules_refuse_a_metric_without_definition(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    file = Path("fleet/planted.py")
    file.parent.mkdir()
    file.write_text(f"{line}\n")

    assert (
        len([told for told in complaints([file]) if "prometheus_client" in told or "without a definition" in told]) == 1
    )
    file.write_text("from prometheus_client import CollectorRegistry\n")
    assert not list(complaints([file]))
