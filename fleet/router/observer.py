"""Observed machine: a router machine that shows every event and command to an observer, such as a log or a recording."""

from collections.abc import Sequence
from typing import Any, Protocol

from fleet.core.clock import Nanos
from fleet.router.machine import RouterMachine
from fleet.router.messages import Command, RouterEvent


class Observer(Protocol):
    """A function that is called after each event, before its commands are performed; it must neither block nor raise."""

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        """Process an event and its commands.

        Args:
            now: The instant that the machine was given.
            event: The event.
            commands: The machine's commands; None: the machine raised.
        """
        ...


class ObservedMachine(RouterMachine):
    """A machine that calls an observer after each event; a machine without an observer has no extra cost."""

    def __init__(self, *arguments: Any, observer: Observer, **named: Any):
        super().__init__(*arguments, **named)
        self._observer = observer

    def handle(self, event: RouterEvent, now: Nanos) -> list[Command]:
        commands: list[Command] | None = None
        try:
            commands = super().handle(event, now)
        finally:
            self._observer(now, event, commands)
        return commands
