"""Virtual process: code that may be killed, or stand still like after SIGSTOP, in virtual time.

Rules:

1. Everything that happens to a process (a timer, a message) goes through `run`. A killed process runs nothing any more.
2. A frozen process runs nothing either, and everything that would have run happens in order when it is thawed.
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
        """Run something later, unless the process is dead by then."""
        self.kernel.after(delay, lambda: self.run(action))

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Run everything that was held back while the process was frozen, in order."""
        self.frozen = False
        while self._held and self.alive and not self.frozen:
            held, self._held = self._held, deque()
            for action in held:
                if self.alive:
                    action()

    def kill(self) -> None:
        """End the process at once."""
        self.alive = False
        self._held.clear()


class Once:
    """Decides which of several possible ends of a wait comes first."""

    def __init__(self) -> None:
        self.over = False

    def first(self) -> bool:
        """Return True at the first call only."""
        before, self.over = self.over, True
        return not before
