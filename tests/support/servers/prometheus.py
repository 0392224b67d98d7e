"""Real Prometheus server for tests, in its own process, and metrics pages of routers for it to scrape."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from fleet.core.clock import Nanos
from fleet.core.demand_reports import DemandReport
from fleet.core.ids import Incarnation
from fleet.frontend.metrics.demand import DemandMetrics
from tests.support.kvstore.builders import a_short_folder
from tests.support.planner.demand_routers import DemandRouter
from tests.support.servers.processes import ServerProcess, a_free_port


class PrometheusServer(ServerProcess):
    """Runs a server that scrapes each target every half second. `scrape` has further scrape settings, such as TLS."""

    def __init__(
        self,
        folder: Path,
        targets: Sequence[str],
        relabel: Sequence[dict[str, object]] = (),
        scrape: Mapping[str, object] | None = None,
    ) -> None:
        if (command := shutil.which("prometheus")) is None:
            pytest.skip("needs Prometheus: apt-get install prometheus")
        self.port = a_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        job = {
            "job_name": "routers",
            "static_configs": [{"targets": list(targets)}],
            "metric_relabel_configs": list(relabel),
            **(scrape or {}),
        }
        config = folder / "prometheus.yml"  # JSON is YAML
        config.write_text(json.dumps({"global": {"scrape_interval": "500ms"}, "scrape_configs": [job]}))
        options = (
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        )
        super().__init__([command, *options], folder, self._is_ready)

    def query(self, expression: str) -> dict[str, str]:
        """Return the current values of an expression, by the address of the target."""
        with urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return {each["metric"]["instance"]: each["value"][1] for each in found}

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


@contextmanager
def a_prometheus_server(
    targets: Sequence[str], relabel: Sequence[dict[str, object]] = (), scrape: Mapping[str, object] | None = None
) -> Iterator[PrometheusServer]:
    with a_short_folder() as folder:
        server = PrometheusServer(folder, targets, relabel, scrape)
        try:
            yield server
        finally:
            server.kill()


class RouterPage:
    """Serves the metrics page of a router whose demand the test sets; port 0: any free port."""

    def __init__(self, incarnation: str, port: int = 0) -> None:
        self.router = DemandRouter()
        self._began, _, _ = self.router.demand()
        self._incarnation = Incarnation(incarnation)
        registry = CollectorRegistry()
        registry.register(DemandMetrics(self))
        registry.register(self)
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        self.port = self._server.server_port

    def collect(self) -> Iterator[Metric]:
        """Yield the load of workers, like `fleet.frontend.metrics.router`."""
        _, _, workers = self.router.demand()
        running = GaugeMetricFamily("fleet_worker_running", "Running requests", labels=["worker", "model", "role"])
        for each in workers:
            running.add_metric([each.worker_id, each.model, each.role], each.running)
        yield running

    def restart(self, incarnation: str) -> None:
        """Begin another incarnation, whose counts begin at zero."""
        self._incarnation = Incarnation(incarnation)
        self._began, _, _ = self.router.demand()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def report(self, after: int) -> tuple[int, DemandReport]:
        now, models, workers = self.router.demand()
        uptime = Nanos(now - self._began)
        report = DemandReport(
            router="r", incarnation=self._incarnation, at=now, uptime=uptime, models=models, workers=workers
        )
        return after, report

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
