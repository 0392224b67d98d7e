"""Installation: the command that installs what is missing here."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
"""Folder that contains the package; it has a Makefile if Fleet runs from a checkout."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra: ``make install`` in a checkout, and pip elsewhere."""
    return "make install" if (CHECKOUT / "Makefile").is_file() else f"pip install 'fleet-serving[{extra}]'"
