"""Resource presets of the Helm chart: define requests and limits of the chart's pods for several cluster sizes."""

from collections.abc import Mapping
from enum import StrEnum

Resources = Mapping[str, Mapping[str, str]]


class ResourcePreset(StrEnum):
    NONE = "None"
    """No preset: only `pods.resources` sets resources."""

    SMALL = "Small"
    """For a trial, or for up to about 200 DisaggDeployments."""

    MEDIUM = "Medium"
    """For up to about 1000 DisaggDeployments, or for routers with four processes."""

    LARGE = "Large"
    """For more than about 1000 DisaggDeployments, or for routers with eight processes."""


def _resources(cpu: str, memory: str, most_memory: str) -> Resources:
    """Return requests of CPU and memory, and a limit of memory.

    CPUs have no limit, because a throttled process misses its deadlines.
    """
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": most_memory}}


PRESETS: Mapping[str, Mapping[str, Resources]] = {
    # A router process uses one core at most, and memory for held requests and the prefix index.
    "routers": {
        ResourcePreset.SMALL.value: _resources("1", "1Gi", "2Gi"),
        ResourcePreset.MEDIUM.value: _resources("4", "4Gi", "8Gi"),
        ResourcePreset.LARGE.value: _resources("8", "8Gi", "16Gi"),
    },
    # 200 deployments take 6 s of CPU time and at most 150 MB to settle (`python -m loadtests.kube.operator_scale`).
    "operator": {
        ResourcePreset.SMALL.value: _resources("100m", "256Mi", "512Mi"),
        ResourcePreset.MEDIUM.value: _resources("500m", "1Gi", "2Gi"),
        ResourcePreset.LARGE.value: _resources("1", "2Gi", "4Gi"),
    },
    # A rehearsal of a plan runs the simulator in a further process, which needs CPU and memory in the same pod.
    "planner": {
        ResourcePreset.SMALL.value: _resources("200m", "256Mi", "1Gi"),
        ResourcePreset.MEDIUM.value: _resources("1", "512Mi", "2Gi"),
        ResourcePreset.LARGE.value: _resources("2", "1Gi", "4Gi"),
    },
}
"""Resources of a container, by component of the chart and then by preset."""
