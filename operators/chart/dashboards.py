"""Dashboards: generates Grafana dashboards. A metric or label that is not in the metric catalogue is an error.

The schema version is 39 (Grafana 10.4 and later). The user chooses the namespace by a variable of the dashboard;
Prometheus adds the namespace to scraped metrics as a label.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from kvstore.metric_definitions import MetricDefinition
from operators.chart.metric_catalogue import OPERATOR, ROUTER, STORE, Definitions, by_name

SCOPE = 'namespace=~"$namespace"'
WINDOW = "$__rate_interval"
ALIKE = frozenset(
    {
        *(f"fleet_worker_{each}" for each in ("running", "waiting", "kv_blocks_used", "kv_blocks", "cached_blocks")),
        "fleet_cache_workers",
        "fleet_index_blocks",
        "fleet_refused_workers",
        "fleet_store_blocks",
        "fleet_operator_deployments",
        "fleet_operator_objects",
    }
)
"""Metrics that several processes report about the same objects: for example, every router reports the same workers.
A dashboard shows the highest value that a process reports, and not the sum over all processes."""

COLUMNS, WIDTH, HEIGHT = 3, 8, 7


class Query(Struct, frozen=True):
    expression: str
    legend: str


class Panel(Struct, frozen=True, kw_only=True):
    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    most: float | None = None
    """Upper end of the vertical axis, or None if Grafana chooses it."""


class Row(Struct, frozen=True):
    title: str
    panels: tuple[Panel, ...]


class Queries:
    """Builds the queries and panels of a dashboard from the metrics of one kind of process, such as the router."""

    def __init__(self, definitions: Definitions) -> None:
        self._catalogue = by_name(definitions)

    def metric(self, name: str, kind: str, by: Iterable[str] = ()) -> MetricDefinition:
        """Return the definition of a metric, after a check of its kind and its labels.

        Raises:
            LookupError: There is no metric of that name and kind, or it does not have these labels.
        """
        found = self._catalogue.get(name)
        if found is None or found.type != kind:
            raise LookupError(f"{name}: there is no such {kind}")
        if missing := set(by) - {*found.labels} - {"pod"}:
            raise LookupError(f"{name}: has no label {min(missing)}")
        return found

    def rate(self, name: str, *by: str, legend: str = "") -> Query:
        """Return the query for the rate of a counter per second, summed by the labels in `by`."""
        self.metric(name, "counter", by)
        return Query(_summed(by, f"rate({name}_total{{{SCOPE}}}[{WINDOW}])"), legend or _legend(by))

    def level(self, name: str, *by: str, legend: str = "", over: str = "sum") -> Query:
        self.metric(name, "gauge", by)
        expression = f"{name}{{{SCOPE}}}"
        if name in ALIKE:
            expression = f"max without (instance, pod, router) ({expression})"
        return Query(_summed(by, expression, over), legend or _legend(by))

    def quantile(self, name: str, of: float, *by: str) -> Query:
        self.metric(name, "histogram", by)
        inner = _summed(("le", *by), f"rate({name}_bucket{{{SCOPE}}}[{WINDOW}])")
        return Query(f"histogram_quantile({of}, {inner})", f"p{of * 100:g} {_legend(by)}".strip())

    def rates(self, title: str, name: str, *by: str, unit: str = "reqps") -> Panel:
        """Return a panel with the rates of a counter, with one line for each combination of values of the labels."""
        return self.panel(title, name, unit, self.rate(name, *by))

    def levels(self, title: str, name: str, *by: str, unit: str = "short") -> Panel:
        return self.panel(title, name, unit, self.level(name, *by))

    def times(self, title: str, name: str, *by: str) -> Panel:
        """Return a panel with the percentiles 50, 90 and 99 of a histogram of durations."""
        return self.panel(title, name, "s", *(self.quantile(name, of, *by) for of in (0.5, 0.9, 0.99)))

    def panel(self, title: str, name: str, unit: str, *queries: Query) -> Panel:
        return Panel(title=title, meaning=self._catalogue[name].meaning, unit=unit, queries=queries)


def share(title: str, meaning: str, part: Query, *whole: Query) -> Panel:
    """Return a panel with `part` divided by the sum of `whole`, a number from 0 to 1."""
    total = " + ".join(each.expression for each in whole)
    query = Query(f"{part.expression} / ({total})", part.legend)
    return Panel(title=title, meaning=meaning, unit="percentunit", queries=(query,), most=1.0)


def requests() -> dict[str, Any]:
    """Return the routers' dashboard: requests, times, tokens, workers."""
    of = Queries(ROUTER)
    rows = (
        Row(
            "Requests",
            (
                of.rates("Ended", "fleet_requests", "outcome"),
                of.panel(
                    "Under way",
                    "fleet_active_requests",
                    "short",
                    of.level("fleet_active_requests", legend="all"),
                    of.level("fleet_queued_requests", legend="waiting for a worker"),
                ),
                of.rates("Refused", "fleet_refused_requests", "reason"),
                of.rates("Placed", "fleet_placements", "why"),
                of.rates("Impossible", "fleet_impossible_requests", "cause"),
                of.rates("Relayed to external servers", "fleet_relayed_requests", "outcome"),
            ),
        ),
        Row(
            "Times",
            (
                of.times("Time to first token", "fleet_ttft_seconds"),
                of.times("Time per token", "fleet_tpot_seconds"),
                of.times("Longest gap between tokens", "fleet_itl_max_seconds"),
                of.times("Whole answer", "fleet_request_seconds"),
                of.times("Time to first byte, relayed", "fleet_relayed_ttft_seconds"),
                of.times("Whole answer, relayed", "fleet_relayed_request_seconds"),
            ),
        ),
        Row(
            "Tokens and caches",
            (
                of.panel(
                    "Tokens",
                    "fleet_completion_tokens",
                    "short",
                    of.rate("fleet_prompt_tokens", legend="prompts"),
                    of.rate("fleet_completion_tokens", legend="answers"),
                ),
                share(
                    "Prompt tokens that were cached",
                    of.metric("fleet_cached_tokens", "counter").meaning,
                    of.rate("fleet_cached_tokens", legend="cached"),
                    of.rate("fleet_prompt_tokens"),
                ),
                of.rates("Blocks of prompts", "fleet_kv_blocks", "phase", "source", unit="short"),
                of.rates("KV moved", "fleet_kv_bytes", "phase", "source", unit="Bps"),
                of.panel(
                    "Belief about caches",
                    "fleet_cache_precision",
                    "percentunit",
                    of.level(
                        "fleet_cache_precision",
                        "model",
                        "knowledge",
                        legend="precision, {{model}} {{knowledge}}",
                        over="avg",
                    ),
                    of.level(
                        "fleet_cache_recall", "model", "knowledge", legend="recall, {{model}} {{knowledge}}", over="avg"
                    ),
                ),
                of.levels("Blocks that the index knows", "fleet_index_blocks"),
            ),
        ),
        Row(
            "Pools",
            (
                of.levels("Requests that run", "fleet_worker_running", "model", "role"),
                of.levels("Requests that wait in engines", "fleet_worker_waiting", "model", "role"),
                of.levels("Prompt tokens to be computed", "fleet_worker_booked_prefill_tokens", "model", "role"),
                share(
                    "KV blocks in use",
                    of.metric("fleet_worker_kv_blocks_used", "gauge").meaning,
                    of.level("fleet_worker_kv_blocks_used", "role", "worker", legend="{{role}} {{worker}}"),
                    of.level("fleet_worker_kv_blocks", "role", "worker"),
                ),
                of.levels("Blocks of stores", "fleet_store_blocks", "store", "tier"),
                of.levels("Workers by knowledge of their caches", "fleet_cache_workers", "model", "knowledge"),
            ),
        ),
        Row(
            "Trouble",
            (
                of.panel(
                    "Second tries",
                    "fleet_retried",
                    "reqps",
                    of.rate("fleet_retried", legend="tried again"),
                    of.rate("fleet_fallbacks", legend="prefilled by the decode worker"),
                    of.rate("fleet_continued", legend="continued elsewhere"),
                ),
                of.panel(
                    "Workers",
                    "fleet_workers_lost",
                    "short",
                    of.rate("fleet_workers_lost", legend="lost"),
                    of.level(
                        "fleet_refused_workers", "model", "different", legend="refused: {{model}}, other {{different}}"
                    ),
                ),
                of.panel(
                    "Decisions and hand-offs",
                    "fleet_policy_fallbacks",
                    "reqps",
                    of.rate("fleet_policy_fallbacks", legend="default policy decided"),
                    of.rate("fleet_kv_mismatches", legend="blocks not alike"),
                    of.rate("fleet_late_messages", legend="late messages"),
                ),
                of.levels("Directory of workers answers (1), or not (0)", "fleet_directory_reachable", "pod"),
            ),
        ),
        Row(
            "Tenants",
            (
                of.rates("Requests let in", "fleet_tenant_requests", "tenant"),
                of.rates("Tokens", "fleet_tenant_tokens", "tenant", "of", unit="short"),
                of.levels("Tasks of event loops", "fleet_tasks", "pod"),
            ),
        ),
    )
    return _dashboard("fleet-requests", "Fleet / Requests", "fleet_active_requests", rows)


def store() -> dict[str, Any]:
    """Return the dashboard of KV store nodes: tiers, their hits, times and free space."""
    of = Queries(STORE)
    tier = ("tier",)
    rows = (
        Row(
            "Hits",
            (
                share(
                    "Hit rate",
                    of.metric("kvstore_tier_hits", "counter").meaning,
                    of.rate("kvstore_tier_hits", *tier),
                    of.rate("kvstore_tier_hits", *tier),
                    of.rate("kvstore_tier_misses", *tier),
                ),
                of.rates("Read", "kvstore_tier_bytes_read", *tier, unit="Bps"),
                of.rates("Written", "kvstore_tier_bytes_written", *tier, unit="Bps"),
            ),
        ),
        Row(
            "Room",
            (
                of.panel(
                    "Bytes",
                    "kvstore_tier_bytes",
                    "bytes",
                    of.level("kvstore_tier_bytes", *tier, legend="{{tier}}"),
                    of.level("kvstore_tier_capacity_bytes", *tier, legend="{{tier}}, room"),
                ),
                of.rates("Evicted", "kvstore_tier_evicted", *tier, unit="short"),
                of.panel(
                    "Kept in place",
                    "kvstore_pinned_blocks",
                    "short",
                    of.level("kvstore_pinned_blocks", "pod", legend="blocks, {{pod}}"),
                ),
                of.levels("Held for sessions", "kvstore_held_bytes", "pod", unit="bytes"),
                of.panel(
                    "What other sizes and policies would hit",
                    "kvstore_shadow_hit_rate",
                    "percentunit",
                    of.level("kvstore_shadow_hit_rate", "policy", "scale", over="avg"),
                ),
            ),
        ),
        Row(
            "Times and trouble",
            (
                of.times("Operations", "kvstore_tier_operation_seconds", "tier", "operation"),
                of.panel(
                    "Failures",
                    "kvstore_tier_failures",
                    "short",
                    of.rate("kvstore_tier_failures", *tier, legend="{{tier}}"),
                    of.rate("kvstore_tier_corrupt", *tier, legend="{{tier}}, corrupt"),
                    of.rate("kvstore_tier_refused", *tier, legend="{{tier}}, refused"),
                ),
                of.panel(
                    "Clients",
                    "kvstore_mismatches",
                    "short",
                    of.rate("kvstore_mismatches", legend="blocks not alike"),
                    of.rate("kvstore_undecodable", legend="no messages"),
                    of.rate("kvstore_expired", legend="leases that ended"),
                ),
            ),
        ),
    )
    return _dashboard("fleet-kv-store", "Fleet / KV store", "kvstore_pinned_blocks", rows)


def operator() -> dict[str, Any]:
    """Return the dashboard of the operator: its objects, its reconciles and their durations."""
    of = Queries(OPERATOR)
    rows = (
        Row(
            "Deployments",
            (
                of.levels("By readiness", "fleet_operator_deployments", "ready"),
                of.levels("Waiting to be looked at", "fleet_operator_queue", "pod"),
                of.levels("Objects known", "fleet_operator_objects", "kind"),
            ),
        ),
        Row(
            "Work",
            (
                of.rates("Looks", "fleet_operator_reconciles", "outcome", unit="ops"),
                of.rates("Writes", "fleet_operator_writes", "write", unit="ops"),
                of.times("One look", "fleet_operator_reconcile_seconds"),
            ),
        ),
        Row(
            "Process",
            (
                of.levels("Who leads", "fleet_operator_leads", "pod"),
                of.levels("Lists and watches begun anew", "fleet_operator_watch_restarts", "pod"),
            ),
        ),
    )
    return _dashboard("fleet-operator", "Fleet / Operator", "fleet_operator_leads", rows)


DASHBOARDS: Mapping[str, Callable[[], dict[str, Any]]] = {"requests": requests, "kv-store": store, "operator": operator}


def _summed(by: Sequence[str], inner: str, over: str = "sum") -> str:
    return f"{over} by ({', '.join(by)}) ({inner})" if by else f"{over}({inner})"


def _legend(by: Iterable[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by)


def _dashboard(uid: str, title: str, known_by: str, rows: Sequence[Row]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    below = 0
    for row in rows:
        panels.append({"type": "row", "title": row.title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": below}})
        below += 1
        for at, panel in enumerate(row.panels):
            place = {"h": HEIGHT, "w": WIDTH, "x": at % COLUMNS * WIDTH, "y": below + at // COLUMNS * HEIGHT}
            panels.append(_panel(panel, place))
        below += -(-len(row.panels) // COLUMNS) * HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["fleet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _namespace_variable(known_by)]},
        "panels": [{"id": number, **each} for number, each in enumerate(panels, 1)],
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    bounds = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expression, "legendFormat": query.legend or "all"}
            for at, query in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}


def _namespace_variable(known_by: str) -> dict[str, Any]:
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values({known_by}, namespace)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }
