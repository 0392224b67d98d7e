"""C modules: finds C modules that do not load in this installation, and warns that more CPU time is needed without them.

Each C module has a twin in Python with the same results, and the code that uses the module falls back to the twin. So
nothing fails without the C modules, but more CPU time is needed.
"""

import logging
from collections.abc import Iterable
from importlib import import_module
from typing import Final

from msgspec import Struct

log = logging.getLogger(__name__)

ROUTER_MODULES: Final = ("fleet.router.native._costs", "kvstore.native._chain")
"""The C modules that a router runs for each request."""

ALL_MODULES: Final = (
    *ROUTER_MODULES,
    "kvstore.native._checksum",
    "kvstore.native._kernels",
    "kvstore.native._table",
)

ROUTER_COST: Final = "a router takes up to 57 % more CPU time per request"
REMEDY: Final = (
    "install a C compiler and Python's headers, then pip install --force-reinstall --no-deps fleet-serving, "
    "or in a checkout: make clean install"
)


class MissingModule(Struct, frozen=True):
    """A C module that does not load in this installation, with the reason."""

    name: str
    cause: str
    rebuild_helps: bool
    """True if building the module can help. False if it was built, but reports that this processor cannot run it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.cause})"


def missing_modules(names: Iterable[str] = ALL_MODULES) -> list[MissingModule]:
    """Try to load these C modules, and return those that do not load."""
    missing = []
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError:
            missing.append(MissingModule(name, "not built", True))
        except ImportError as error:
            # `error.path` is set if the file could not be loaded. It is None if the module ran and refused this processor.
            missing.append(MissingModule(name, str(error), error.path is not None))
    return missing


def warn_of_missing_modules() -> None:
    """Log one warning if C modules of the router do not load, although building them could help."""
    missing = [each for each in missing_modules(ROUTER_MODULES) if each.rebuild_helps]
    if missing:
        log.warning(
            "C modules missing, requests cost more CPU time",
            extra={"missing": ", ".join(map(str, missing)), "cost": ROUTER_COST, "remedy": REMEDY},
        )
