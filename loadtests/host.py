"""Facts about the machine and the versions of packages, for the figures of benchmarks."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil


def facts(folder: Path, packages: Sequence[str]) -> dict[str, Any]:
    """Return the facts about this machine.

    Args:
        folder: Folder on the measured disk.
        packages: Packages whose versions are listed; packages that are not installed are left out.
    """
    usage = psutil.disk_usage(str(folder))
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _file_system(folder),
        "disk_free_gib": round(usage.free / (1 << 30), 1),
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())


def _file_system(folder: Path) -> str:
    """Return type and device of the file system that contains the folder, or "unknown" if no mount point is found."""
    below = [each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)]
    if not below:
        return "unknown"
    found = max(below, key=lambda each: len(each.mountpoint))
    return f"{found.fstype} on {found.device}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
