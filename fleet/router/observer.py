"""A router's machine that is looked at: who keeps a log or a recording of it sees all that goes in and comes out."""

from collections.abc import Sequence
from typing import Any, Protocol

from fleet.core.clock import Nanos
from fleet.router.machine import RouterMachine
from fleet.router.messages import Command, RouterEvent


class Observer(Protocol):
    """Called after each event, before its commands are performed; must neither wait nor raise."""

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        """Takes in what happened.

        Args:
            now: The instant that the machine was told.
            event: What it heard.
            commands: What it said; None: it broke.
        """
        ...


class ObservedMachine(RouterMachine):
    """A machine with an observer. Nobody who wants none pays for one."""

    def __init__(self, *arguments: Any, observer: Observer, **named: Any):
        """As `RouterMachine`, and who looks on."""
        super().__init__(*arguments, **named)
        self._observer = observer

    def handle(self, event: RouterEvent, now: Nanos) -> list[Command]:
        commands: list[Command] | None = None
        try:
            commands = super().handle(event, now)
        finally:
            self._observer(now, event, commands)
        return commands
