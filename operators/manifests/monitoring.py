"""Where metrics are."""

from operators.manifests.names import DesiredDeployment, selected
from operators.manifests.objects import Manifest, of_all


def pod_monitor(deployment: DesiredDeployment) -> Manifest:
    """Routers have metrics; what workers do is in them."""
    spec = {
        "selector": {"matchLabels": selected(deployment, deployment.router)},
        "podMetricsEndpoints": [{"port": "health", "path": "/metrics"}],
    }
    return of_all(deployment, "monitoring.coreos.com/v1", "PodMonitor", f"{deployment.name}-router", spec)
