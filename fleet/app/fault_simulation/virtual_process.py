"""Virtual process: represents a process in virtual time that may be killed, or frozen as by SIGSTOP.

Rules:

1. Every timer and message of a process calls a function through `run`. After a process was killed, `run` calls nothing.
2. While a process is frozen, `run` only keeps the functions. They are called in order when the process is thawed.
"""

from collections import deque
from collections.abc import Callable

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel

Action = Callable[[], None]


class VirtualProcess:
    def __init__(self, kernel: Kernel, name: str):
        self.kernel = kernel
        self.name = name
        self.alive = True
        self.frozen = False
        self._held: deque[Action] = deque()

    @property
    def now(self) -> Nanos:
        return self.kernel.instant

    def run(self, action: Action) -> None:
        if not self.alive:
            return
        if self.frozen or self._held:
            self._held.append(action)
        else:
            action()

    def after(self, delay: int, action: Action) -> None:
        """Call a function through `run` after a delay. If the process has died before, the function is not called."""
        self.kernel.after(delay, lambda: self.run(action))

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Let a frozen process go on: call in order all functions that were kept while it was frozen."""
        self.frozen = False
        while self._held and self.alive and not self.frozen:
            held, self._held = self._held, deque()
            for action in held:
                if self.alive:
                    action()

    def kill(self) -> None:
        """End the process at once, and drop the functions that were kept while it was frozen."""
        self.alive = False
        self._held.clear()


class Once:
    """Lets only the first one of several callbacks take effect, such as an answer and a timeout."""

    def __init__(self) -> None:
        self.over = False

    def first(self) -> bool:
        """Return True at the first call, and False at all later calls."""
        before, self.over = self.over, True
        return not before
