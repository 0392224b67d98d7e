"""Observed machine: a router machine that shows every event and command to an observer, such as a log or a recording."""

from collections.abc import Sequence
from typing import Any, Protocol

from fleet.core.clock import Nanos
from fleet.router.machine import RouterMachine
from fleet.router.messages import Command, RouterEvent


class Observer(Protocol):
    """Port: is called after each event, before the commands of the event are performed. It must neither block nor raise."""

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        """Take note of an event and its commands.

        Args:
            now: The instant that the machine was given.
            event: The event.
            commands: The commands that the machine returned; None: the machine raised an exception.
        """
        ...


class Observers:
    """Observer that calls several observers in order."""

    def __init__(self, *observers: Observer):
        self._observers = observers

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        for observer in self._observers:
            observer(now, event, commands)


class ObservedMachine(RouterMachine):
    """Router machine that calls an observer after each event. A router without an observer uses `RouterMachine`, at no extra cost."""

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
