"""`fleet kv bench`: measures the KV store, and compares it with the limits of the machine and with other stores.

The benchmark `loadtests.kvstore.bench` belongs to a checkout, not to the installed package: it starts servers, fills
disks and installs other stores, which a production machine does not need.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from fleet.core.errors import ConfigurationRefused

MODULE = "loadtests.kvstore.bench"
CHECKOUT = Path(__file__).resolve().parents[3]


def configure(parser: argparse.ArgumentParser) -> None:
    _bench().configure(parser)


def run(arguments: argparse.Namespace) -> int:
    status: int = _bench().run(arguments)
    return status


def _bench() -> ModuleType:
    """Import the module of the benchmark from the checkout, whatever the current folder is, and return it.

    Raises:
        ConfigurationRefused: Fleet does not run from a checkout.
    """
    if not CHECKOUT.joinpath(*MODULE.split(".")).with_suffix(".py").is_file():
        raise ConfigurationRefused(
            f"kv bench: {CHECKOUT} has no loadtests; call it from a checkout with Fleet installed in editable mode (pip install -e .)"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return importlib.import_module(MODULE)
