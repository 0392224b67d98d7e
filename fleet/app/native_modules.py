"""C modules: which of them do not load in this installation, and what that costs.

Each C module has a twin in Python with the same results, and whoever uses it falls back by itself. So nothing fails
without them, but everything takes more CPU time.
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
    """A C module that does not load."""

    name: str
    cause: str
    rebuild_helps: bool
    """False if the module was built, and says that this processor cannot run it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.cause})"


def missing_modules(names: Iterable[str] = ALL_MODULES) -> list[MissingModule]:
    """Load these modules, and return the ones that do not load."""
    missing = []
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError:
            missing.append(MissingModule(name, "not built", True))
        except ImportError as error:
            # The loader names the file that it cannot load; a module that ran and refused this processor names none.
            missing.append(MissingModule(name, str(error), error.path is not None))
    return missing


def warn_of_missing_modules() -> None:
    """Log one warning if a router runs without C modules that could be built."""
    missing = [each for each in missing_modules(ROUTER_MODULES) if each.rebuild_helps]
    if missing:
        log.warning(
            "C modules missing, requests cost more CPU time",
            extra={"missing": ", ".join(map(str, missing)), "cost": ROUTER_COST, "remedy": REMEDY},
        )
