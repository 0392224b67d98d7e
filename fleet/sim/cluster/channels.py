"""Channels: carry messages between a router and its workers in virtual time; a channel can be cut for a time."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """Carries messages in one direction between a router and a worker or store. They arrive after a delay, in the order of sending.

    Messages that were sent in one instant keep their order, too, although the kernel runs the events of one instant in
    a random order.
    """

    __slots__ = ("_delay", "_deliver", "_held_back", "_kernel", "_latest", "_sent_at", "_under_way")

    def __init__(self, kernel: Kernel, delay: Nanos, deliver: Callable[[Message], None]):
        self._kernel, self._delay, self._deliver = kernel, delay, deliver
        # messages that have not arrived; one list contains all messages of one instant, which arrive in one event
        self._under_way: deque[list[Message]] = deque()
        self._latest: list[Message] = []
        self._sent_at: Nanos | None = None  # instant at which the messages in _latest were sent
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
        """Cut the channel: hold back all messages that are sent from now on."""
        self._held_back = []

    def restore(self) -> None:
        """End a cut and send the messages that were held back, in order."""
        held, self._held_back = self._held_back, None
        for message in held or ():
            self.send(message)

    def drop_held(self) -> None:
        """Drop the messages that the present cut has held back; the cut goes on."""
        if self._held_back is not None:
            self._held_back = []

    def _arrive(self) -> None:
        messages = self._under_way.popleft()
        if messages is self._latest:
            # The list has arrived. So the next message needs a new list, even if it is sent at this instant.
            self._sent_at = None
        deliver = self._deliver
        for message in messages:
            deliver(message)
