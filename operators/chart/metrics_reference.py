"""Metrics reference: generates docs/metrics.md, the page about the metrics of all processes.

The page is generated from the same definitions as the metrics themselves. `make docs` writes the page, and `make check`
fails if it is not up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore.metric_definitions import HistogramDefinition, MetricDefinition
from operators.chart.metric_catalogue import PROCESSES, Definitions

INTRODUCTIONS = {
    "router": (
        "Router: `fleet serve router`",
        (
            "At `/metrics` of `http_listen` and of `health_listen`. All processes of one router answer together, and each sample then has the label `router`. "
            "The labels `model` and `role` name a pool; requests for a LoRA adapter count under its base model. A request whose model is not served here counts under `unknown`."
        ),
    ),
    "worker": (
        "Worker: `fleet serve worker`",
        "At `/metrics` of `metrics_listen`. A router exports what workers report to it as `fleet_worker_…`.",
    ),
    "kvstore": (
        "KV store node: `fleet serve kvstore`, or the part of a worker with `store.embedded`",
        "At `/metrics` of `metrics_listen`. The pool is the tier `cpu`.",
    ),
    "planner": ("Planner: `fleet serve planner`", "At `/metrics` of `metrics_listen`."),
    "kube-planner": ("Planner on Kubernetes: `fleet serve kube-planner`", "At `/metrics` of `listen`."),
    "operator": ("Operator: `fleet serve operator`", "At `/metrics` of `listen`."),
}


LOCAL_CLUSTER = """
## Scrape a cluster of `fleet up`

The router's metrics are at its HTTP port. The ports of the other processes are off; a topology opens them:

<!-- docs-test: settings topology -->
```toml
metrics_access.key_sha256 = ["b6d0f7f4c2b1b0e9a9c3f0a5a6a3b1a1f2d3c4b5a697887766554433221100ff"]
router.metrics_access.key_sha256 = ["b6d0f7f4c2b1b0e9a9c3f0a5a6a3b1a1f2d3c4b5a697887766554433221100ff"]
store.metrics_listen = "127.0.0.1:9400"

[[pools]]
role = "prefill"
metrics_listen = "127.0.0.1:9410"

[[pools]]
role = "decode"
replicas = 2
metrics_listen = "127.0.0.1:9500"
```

The worker `decode-0` then answers at port 9500, `decode-1` at 9501, and one that `fleet scale` or the planner adds at the next port. Each pool needs as many ports as `cluster.most_workers` says, 64 by default; `fleet up` refuses pools whose ports overlap. `[planner]` has a `metrics_listen` too.
With `fleet up --tls` all these ports speak TLS with the cluster's certificate; `[metrics_tls]` names one of your own. In Prometheus, set `scheme`, `tls_config.ca_file` and `authorization.credentials`
of the job. [security.md](security.md) says who may read metrics.
"""


def reference() -> str:
    """Return the content of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every process answers in the Prometheus text format, and in OpenMetrics if the scraper asks for it. The tables list all metrics with their labels. A histogram adds `_bucket`, `_sum` and",
        "`_count` to its name, and the label `le`. This page is generated from the code by `make docs`, and `make check` fails if the two differ.",
    ]
    lines += LOCAL_CLUSTER.rstrip("\n").split("\n")
    for part, definitions in PROCESSES.items():
        title, text = INTRODUCTIONS[part]
        lines += ["", f"## {title}", "", text, "", *_table(definitions)]
    return "\n".join(lines) + "\n"


def _table(definitions: Definitions) -> Iterator[str]:
    yield "| metric | type | labels | unit | meaning |"
    yield "|---|---|---|---|---|"
    for each in definitions:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "none"
        yield f"| `{each.exported_name}` | {_type(each)} | {labels} | {each.shown_unit} | {each.meaning.replace('|', chr(92) + '|')} |"


def _type(definition: MetricDefinition) -> str:
    """Return the type of a metric in words, and for a histogram also the number and the range of its bounds."""
    if not isinstance(definition, HistogramDefinition):
        return definition.type
    first, last = definition.bounds[0], definition.bounds[-1]
    return f"{definition.type}, {len(definition.bounds)} bounds from {first:g} to {last:g}"


def main() -> int:
    """Write the page to the path in the first argument."""
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
