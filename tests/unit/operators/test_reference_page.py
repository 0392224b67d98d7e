"""Reference page of the Kubernetes kinds: its tables have every field of the sections that they describe, with its default."""

from pathlib import Path

import msgspec
import pytest

from operators.api.disagg_deployment import TracingSpec, WorkerMetricsSpec
from operators.manifests.names import METRICS, STORE_METRICS

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes" / "reference.md"


def table_of(heading):
    """Return the first two columns of the table whose first column has this heading, without backquotes."""
    lines = iter(PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {heading} |"))
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            return rows
        name, value, *_ = (part.strip(" `") for part in line.strip("|").split("|"))
        rows[name] = value
    return rows


@pytest.mark.parametrize(("section", "spec"), [("tracing", TracingSpec), ("workerMetrics", WorkerMetricsSpec)])
def test_reference_page_has_each_field_with_its_default(section, spec):
    rows = table_of(f"field of `spec.{section}`")
    del rows["---"]
    assert rows == {
        field.encode_name: msgspec.json.encode(value).decode().strip('"') if (value := field.default) else "none"
        for field in msgspec.structs.fields(spec)
    }


def test_reference_page_has_the_ports_for_metrics():
    rows = table_of("port of a worker's pod")
    assert (rows["metrics"], rows["store-metrics"]) == (str(METRICS), str(STORE_METRICS))
