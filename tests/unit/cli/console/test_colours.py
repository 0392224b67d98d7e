import io

import pytest

from fleet.cli.console.colours import Colour, coloured


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)

    assert coloured("up", Colour.GREEN, Terminal()) == "\x1b[32mup\x1b[0m"
    assert coloured("up", Colour.GREEN, io.StringIO()) == "up"


@pytest.mark.parametrize("value", ["1", "true"])
def test_no_color_turns_colours_off(value, monkeypatch):
    monkeypatch.setenv("NO_COLOR", value)

    assert coloured("up", Colour.RED, Terminal()) == "up"
