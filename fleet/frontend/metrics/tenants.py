"""Metrics of tenants, read on each scrape. Labels are the tenants that the settings name."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from fleet.router.tenants import TenantUsage


class TenantMetrics:
    def __init__(self, read: Callable[[], Mapping[str, TenantUsage]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fleet_tenant_requests", "Admitted requests", labels=["tenant"])
        tokens = CounterMetricFamily("fleet_tenant_tokens", "Tokens of prompts and of answers", labels=["tenant", "of"])
        for tenant, usage in self._read().items():
            requests.add_metric([tenant], usage.requests)
            tokens.add_metric([tenant, "prompts"], usage.prompt_tokens)
            tokens.add_metric([tenant, "answers"], usage.answer_tokens)
        yield requests
        yield tokens
