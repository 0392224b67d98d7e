"""Virtual network: connects virtual processes. Its connections may be slow, cut, reset or refused.

Rules:

1. A connection delivers in order and at most once, like TCP. Delays differ from message to message.
2. While two processes are cut off from each other, neither messages nor the end of a connection pass between them. When
   the cut ends, they arrive, unless the receiving side has closed the connection before.
3. The end of a process ends its connections. The other side notices the end after it has received all earlier messages.
4. Connections and calls to a frozen process wait, as the operating system keeps them waiting for a real process. The
   process answers them when it is thawed; by then, the timeout of the caller may have passed.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from fleet.app.fault_simulation.fault_points import FaultPoint, FaultPoints
from fleet.app.fault_simulation.virtual_process import Once, VirtualProcess
from fleet.core.clock import MILLISECOND, Nanos
from fleet.sim.kernel import Kernel

LEAST_DELAY = Nanos(MILLISECOND // 20)
MOST_DELAY = Nanos(4 * MILLISECOND)

Received = Callable[[Any], None]
Ended = Callable[[], None]


class ConnectionEnd:
    """One side of a connection.

    The process that owns this side sets two functions: `received` is called with each message, and `ended` is called
    when the connection has ended.
    """

    def __init__(self, network: "VirtualNetwork", process: VirtualProcess):
        self.process = process
        self.peer: ConnectionEnd  # the other side; `VirtualNetwork` sets it
        self.received: Received = lambda _: None
        self.ended: Ended = lambda: None
        self.open = True
        self.deaf = False  # True: all further messages of the peer are lost
        self._network = network
        self._under_way: deque[Any] = deque()  # messages that the peer has sent and that have not arrived yet
        self._due = 0
        self._blocked = 0  # number of messages whose time has come, but which a network cut holds back

    def send(self, message: object) -> None:
        if self.open:
            self.peer.expect(message)

    def close(self) -> None:
        """Close the connection on this side; the other side notices it after a delay."""
        if self.open:
            self.open = False
            self.peer.expect(_CLOSED)
            self._network.forget(self)

    # Methods that the network and the peer call.

    def expect(self, message: object) -> None:
        """Let a message arrive on this side after a delay, and not before earlier messages. If this side is deaf, lose it."""
        if self.deaf:
            return
        network = self._network
        self._under_way.append(message)
        self._due = max(self._due, network.kernel.instant + network.delay(self.process, self.peer.process))
        network.kernel.at(self._due, self.arrive)

    def arrive(self) -> None:
        if self._blocked or self._network.are_cut(self.process, self.peer.process):
            self._blocked += 1
            self._network.points.reach(FaultPoint.STREAM_CUT)
        elif self._under_way:
            self._hand_over()

    def restore(self) -> None:
        """Deliver the messages that a network cut has held back, in order."""
        blocked, self._blocked = self._blocked, 0
        for _ in range(min(blocked, len(self._under_way))):
            self._hand_over()

    def _hand_over(self) -> None:
        message = self._under_way.popleft()
        self.process.run(lambda: self._deliver(message))

    def reset(self, *, silently: bool) -> None:
        """Drop all messages on the way to this side, and close this side.

        If `silently` is true, nothing from this side reaches the other side any more, so the other side does not notice.
        """
        self._under_way.clear()
        if silently:
            self.peer.deaf = True
        self.process.run(lambda: self._deliver(_CLOSED))

    def _deliver(self, message: object) -> None:
        if not self.open:
            return
        if message is _CLOSED:
            self.open = False
            self._network.forget(self)
            self.ended()
        else:
            self.received(message)


_CLOSED = object()


class _Connect(Struct, frozen=True):
    """Message by which `VirtualNetwork.dial` requests a connection to a process."""

    caller: VirtualProcess


class Listener(Struct, frozen=True, kw_only=True):
    """Functions by which a process accepts connections and answers calls."""

    process: VirtualProcess
    accept: Callable[[ConnectionEnd], None]
    handle: Callable[[Any, Callable[[object], None]], None]
    """Function that handles a call. It gets the request, and a function that sends the answer."""


class VirtualNetwork:
    """Connects the virtual processes of one cluster, and performs the faults of its network."""

    def __init__(self, kernel: Kernel, chance: Random, points: FaultPoints):
        self.kernel = kernel
        self.points = points
        self._random = chance.random
        self._cuts: dict[frozenset[str], int] = {}
        self._factors: dict[str, float] = {}
        self._ends: dict[ConnectionEnd, None] = {}
        self._held_calls: dict[frozenset[str], list[Callable[[], None]]] = {}
        self.listeners: dict[str, Listener] = {}
        """For each address, the functions of the process that listens there."""

    # Connections and calls between processes.

    def dial(
        self,
        caller: VirtualProcess,
        address: str,
        opened: Callable[[ConnectionEnd], None],
        failed: Callable[[bool], None],
        timeout: Nanos,
    ) -> None:
        """Connect to an address. Then call `opened` with the caller's side of the connection, or `failed`.

        The argument of `failed` is True if nothing answered in time, and False if the connection was refused.
        """

        def accepted(answer: object) -> None:
            assert isinstance(answer, ConnectionEnd)
            if answer.peer.open:
                opened(answer)
            else:
                failed(False)

        self.call(caller, address, _Connect(caller), accepted, failed, timeout)

    def call(
        self,
        caller: VirtualProcess,
        address: str,
        request: object,
        answered: Callable[[Any], None],
        failed: Callable[[bool], None],
        timeout: Nanos,
    ) -> None:
        """Send a request, and call `answered` with the answer, or `failed` as in `dial`.

        Exactly one of these two functions is called, unless the caller is killed before.

        A request that a network cut holds back arrives when the cut ends, even if the caller does not wait any more.
        """
        once = Once()

        def finish(then: Callable[[Any], None], value: object) -> None:
            if once.first():
                then(value)

        listener = self.listeners.get(address)

        def arrive() -> None:
            if listener is None or not listener.process.alive:
                back(lambda: finish(failed, False))
            else:
                listener.process.run(serve)

        def serve() -> None:
            assert listener is not None
            if isinstance(request, _Connect):
                here, there = self._connect(request.caller, listener.process)
                listener.accept(there)
                back(lambda: finish(answered, here))
            else:
                listener.handle(request, lambda answer: back(lambda: finish(answered, answer)))

        def back(then: Callable[[], None]) -> None:
            other = caller if listener is None else listener.process
            self._carry(other, caller, lambda: caller.run(then))

        caller.after(timeout, lambda: finish(failed, True))
        self._carry(caller, caller if listener is None else listener.process, arrive)

    def _carry(self, sender: VirtualProcess, receiver: VirtualProcess, arrive: Callable[[], None]) -> None:
        def arrived() -> None:
            if self.are_cut(sender, receiver):
                self._held_calls.setdefault(frozenset((sender.name, receiver.name)), []).append(arrive)
            else:
                arrive()

        self.kernel.after(self.delay(sender, receiver), arrived)

    def _connect(self, one: VirtualProcess, other: VirtualProcess) -> tuple[ConnectionEnd, ConnectionEnd]:
        here, there = ConnectionEnd(self, one), ConnectionEnd(self, other)
        here.peer, there.peer = there, here
        self._ends[here] = self._ends[there] = None
        return here, there

    def forget(self, end: ConnectionEnd) -> None:
        self._ends.pop(end, None)

    def delay(self, one: VirtualProcess, other: VirtualProcess) -> Nanos:
        """Return a randomly drawn delay for one message between two processes. `slow_down` multiplies it by a factor."""
        drawn = LEAST_DELAY + self._random() ** 4 * (MOST_DELAY - LEAST_DELAY)
        if self._factors:
            drawn *= max(self._factors.get(one.name, 1.0), self._factors.get(other.name, 1.0))
        return Nanos(round(drawn))

    # Faults of the network.

    def are_cut(self, one: VirtualProcess, other: VirtualProcess) -> bool:
        return bool(self._cuts) and frozenset((one.name, other.name)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def heal(self, one: str, other: str) -> None:
        """End one cut between two processes. If no other cut between them remains, deliver what the cuts have held back."""
        pair = frozenset((one, other))
        self._cuts[pair] -= 1
        if self._cuts[pair]:
            return
        del self._cuts[pair]
        for end in list(self._ends):
            if frozenset((end.process.name, end.peer.process.name)) == pair:
                end.restore()
        for arrive in self._held_calls.pop(pair, ()):
            arrive()

    def slow_down(self, name: str, factor: float) -> None:
        self._factors[name] = factor

    def speed_up(self, name: str) -> None:
        self._factors.pop(name, None)

    def reset(self, one: str, other: str, *, both: bool = True) -> int:
        """Reset all connections between two processes. Return the number of connection ends that were reset.

        If `both` is false, only `other` notices the reset, and `one` believes that the connections are still open.
        """
        pair = frozenset((one, other))
        hit = [
            end
            for end in self._ends
            if frozenset((end.process.name, end.peer.process.name)) == pair and (both or end.process.name == other)
        ]
        for end in hit:
            end.reset(silently=not both)
        return len(hit)

    def ended(self, process: VirtualProcess) -> None:
        """End all connections of a process that has ended."""
        for end in [end for end in self._ends if end.process is process]:
            end.close()
