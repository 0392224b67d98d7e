"""Channels: the paths of messages between a router and its workers in virtual time, which can be cut."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """One direction of a stream between router and worker. Messages arrive after a delay and in the order in which they were sent.

    The kernel draws the order of events of one instant at random, but this does not change the order of messages.
    """

    __slots__ = ("_delay", "_deliver", "_held_back", "_kernel", "_latest", "_sent_at", "_under_way")

    def __init__(self, kernel: Kernel, delay: Nanos, deliver: Callable[[Message], None]):
        self._kernel, self._delay, self._deliver = kernel, delay, deliver
        # each list has the messages that were sent at one instant; they arrive in one event
        self._under_way: deque[list[Message]] = deque()
        self._latest: list[Message] = []
        self._sent_at: Nanos | None = None  # instant of the messages in _latest
        # messages sent while the channel is cut; None: the channel is not cut
        self._held_back: list[Message] | None = None

    def send(self, message: Message) -> None:
        kernel = self._kernel
        if self._held_back is not None:
            self._held_back.append(message)
        elif self._sent_at == kernel.instant:
            self._latest.append(message)
        else:
            self._sent_at = kernel.instant
            self._latest = latest = [message]
            self._under_way.append(latest)
            kernel.after(self._delay, self._arrive)

    @property
    def is_cut(self) -> bool:
        return self._held_back is not None

    def cut(self) -> None:
        """Hold back all later messages."""
        self._held_back = []

    def restore(self) -> None:
        """End a cut and send the messages that were held back, in order."""
        held, self._held_back = self._held_back, None
        for message in held or ():
            self.send(message)

    def drop_held(self) -> None:
        """Drop the messages that were held back during a cut."""
        if self._held_back is not None:
            self._held_back = []

    def _arrive(self) -> None:
        messages = self._under_way.popleft()
        if messages is self._latest:
            self._sent_at = None  # a message that is sent later in this instant must not join the list that has arrived
        deliver = self._deliver
        for message in messages:
            deliver(message)
