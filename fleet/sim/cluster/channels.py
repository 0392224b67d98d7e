"""Ways between a router and its workers in virtual time, which can be cut."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """One way of a stream: what is said arrives a delay later, in order, however the kernel shuffles ties."""

    __slots__ = ("_delay", "_deliver", "_held_back", "_kernel", "_latest", "_said_at", "_under_way")

    def __init__(self, kernel: Kernel, delay: Nanos, deliver: Callable[[Message], None]):
        self._kernel, self._delay, self._deliver = kernel, delay, deliver
        self._under_way: deque[list[Message]] = deque()  # what was said in one instant arrives in one
        self._latest: list[Message] = []
        self._said_at: Nanos | None = None  # the latest
        self._held_back: list[Message] | None = None  # while the way is cut

    def say(self, message: Message) -> None:
        kernel = self._kernel
        if self._held_back is not None:
            self._held_back.append(message)
        elif self._said_at == kernel.instant:
            self._latest.append(message)
        else:
            self._said_at = kernel.instant
            self._latest = latest = [message]
            self._under_way.append(latest)
            kernel.after(self._delay, self._arrive)

    @property
    def is_cut(self) -> bool:
        return self._held_back is not None

    def cut(self) -> None:
        """Hold back what is said from now on."""
        self._held_back = []

    def restore(self) -> None:
        """Send what was held back, in order."""
        held, self._held_back = self._held_back, None
        for message in held or ():
            self.say(message)

    def forget(self) -> None:
        """Lose what was held back."""
        if self._held_back is not None:
            self._held_back = []

    def _arrive(self) -> None:
        messages = self._under_way.popleft()
        if messages is self._latest:
            self._said_at = None  # what is said from now on arrives later
        deliver = self._deliver
        for message in messages:
            deliver(message)
