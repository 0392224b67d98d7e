"""`fleet kv bench`: the KV store beside the machine's limits and its peers.

The benchmark is `loadtests.kvstore.bench`, which belongs to a checkout and not to the installed package: it starts servers,
fills disks, and installs other people's stores, none of which a production machine needs.
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
    """The benchmark, wherever the command was called.

    Raises:
        ConfigurationRefused: This is not a checkout.
    """
    if not CHECKOUT.joinpath(*MODULE.split(".")).with_suffix(".py").is_file():
        raise ConfigurationRefused(
            f"kv bench: {CHECKOUT} has no loadtests; call it from a checkout with Fleet installed in editable mode (make install)"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return importlib.import_module(MODULE)
