"""Virtual loop: an asyncio event loop in virtual time, so that asyncio code runs among the events of a simulation.

Rules:

1. All ready callbacks run in one event of the kernel at the present instant. Such an event is called a turn. Each timer
   is an event, too. So when no callback is ready, time jumps to the next timer or other event. The kernel draws the
   order of timers of one instant at random. Callbacks run in the order in which they became ready, as in every event
   loop.
2. Time is counted in whole nanoseconds. asyncio states the instant of a timer in seconds; it is rounded to the nearest nanosecond.
   So two timers that begin at one instant with equal delays in nanoseconds end at the same instant.
3. `create_unix_connection` connects in memory to the protocol that listens at a path of this loop (`listen`). Written data arrives
   at the peer after `delay`, in order and in the same pieces. The end of a connection also arrives after `delay`, behind the
   data that was written before it. While a path is held (`hold`), written data of both directions and new connections wait.
4. If a callback raises an exception, the kernel's run ends, because the simulation may now be in a wrong state.
5. All other methods of an event loop, such as those for sockets, threads, signals or subprocesses, raise `NotImplementedError`.
"""

import asyncio
import contextvars
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from fleet.core.clock import SECOND, Nanos
from fleet.sim.kernel import Kernel

Result = TypeVar("Result")

LAST_ROUNDS = 10_000
"""Maximum number of turns in which `VirtualLoop.abandon` lets cancelled tasks clean up; tasks that need more are dropped."""


class Deadlocked(Exception):
    """The awaited coroutine has not ended, but no event is left that could continue it."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """An asyncio event loop that uses the virtual time of a kernel.

    `complete` runs the kernel until no event is left.
    """

    def __init__(self, kernel: Kernel, delay: Nanos):
        """Create a loop without tasks. Data that is written on a connection arrives after `delay`."""
        self.kernel = kernel
        self.delay = delay
        self._ready: deque[asyncio.Handle] = deque()
        self._turn_set = False
        self._listening: dict[str, _PathListener] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._running = False
        self._fault: BaseException | None = None

    def complete(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run the kernel until no event is left, and return the result of `main`.

        If `main` or a callback raises an exception, raise this exception.

        Raises:
            Deadlocked: No event is left, but `main` has not ended.
        """
        task = self.create_task(main)
        self.kernel.run()
        if not task.done():
            raise Deadlocked(f"at {self.time():.9f} s nothing is ready and no timer is set")
        return task.result()

    def begin(self, main: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Start a task. If the task raises an exception, the kernel's run ends with that exception."""
        task = self.create_task(main)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error

    def cancel_all(self) -> None:
        """Request the cancellation of every task; the tasks notice it in the next turn."""
        for task in self._tasks:
            task.cancel()

    def abandon(self) -> None:
        """Cancel all tasks and run their clean-up code now, without advancing time. The loop cannot be used afterwards.

        Call this when a run ends early, because asyncio logs an error for each pending task that is destroyed.
        """
        self._listening.clear()
        for _ in range(LAST_ROUNDS):
            self.cancel_all()
            self._fault = None
            with suppress(BaseException):  # errors of the clean-up are ignored, because the run has already failed
                self.turn()
            if not self._tasks:
                return

    # Turns.

    def turn(self) -> None:
        """Run all ready callbacks, and those that become ready while they run. Callbacks must not call this method."""
        assert not self._running
        self._turn_set = False
        ready = self._ready
        asyncio._set_running_loop(self)  # noqa: SLF001 - asyncio's interface for other loops
        self._running = True
        try:
            while ready and self._fault is None:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()  # noqa: SLF001 - asyncio has no public name for it
        finally:
            self._running = False
            asyncio._set_running_loop(None)  # noqa: SLF001 - asyncio's interface for other loops
        if self._fault is not None:
            raise self._fault

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._running and not self._turn_set:
            self._turn_set = True
            self.kernel.after(0, self.turn)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the exception of a callback, or of a task that is not awaited, so that the kernel's run ends with it."""
        self._fault = self._fault or context.get("exception") or RuntimeError(context["message"])

    # Time.

    def time(self) -> float:
        return self.kernel.now() / SECOND

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self._timer(self.kernel.now() + round(delay * SECOND), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self._timer(round(when * SECOND), callback, args, context)

    def _timer(
        self, when: int, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when / SECOND, callback, args, self, context)
        self.kernel.at(Nanos(when), partial(self._due, timer))
        return timer

    def _due(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            self._ready.append(timer)
            self.turn()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing, because a cancelled timer is skipped when it is due."""

    # Tasks.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Result],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Result]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    # Connections.

    def listen(self, path: str, made: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections to `path`. The function `made` creates the listener's protocol for each connection."""
        assert path not in self._listening, path
        self._listening[path] = _PathListener(made)

    def cut(self, path: str) -> None:
        """Stop listening at a path and end all its connections, as if the listening process was killed.

        The protocols of the clients are notified. The protocols of the killed process are not.
        """
        listener = self._listening.pop(path)
        listener.forget()
        for end in listener.ends:
            end.cut()

    def hold(self, path: str) -> bool:
        """Make new connections to a path, and the data of its connections, wait until `release`.

        Return False if nothing listens at the path, or if the path is held already.
        """
        listener = self._listening.get(path)
        return listener is not None and listener.hold()

    def release(self, path: str) -> None:
        """End a `hold`: send the waiting data in order, and let new connections continue.

        Do nothing if nothing listens at the path any more.
        """
        if (listener := self._listening.get(path)) is not None:
            listener.release()

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect to the protocol that listens at `path`. This takes one round trip of virtual time, or longer if the path is held.

        Raises:
            ConnectionRefusedError: No protocol listens at `path`.
        """
        await asyncio.sleep(2 * self.delay / SECOND)
        if (listener := self._listening.get(path)) is None:
            raise ConnectionRefusedError(f"nobody listens at {path}")
        await listener.free()
        near = _ConnectionEnd(self, listener, protocol_factory())
        far = _ConnectionEnd(self, listener, listener.made())
        near.peer, far.peer = far, near
        listener.ends.append(far)
        near.protocol.connection_made(near)
        far.protocol.connection_made(far)
        return near, near.protocol


class _PathListener:
    """Listens at a path, and knows the connections to it. It can hold their data back."""

    def __init__(self, made: Callable[[], asyncio.Protocol]):
        self.made = made
        self.ends: list[_ConnectionEnd] = []
        # functions that send the data that waits while the path is held; None: the path is not held
        self._held: deque[Callable[[], None]] | None = None
        self._free = asyncio.Event()
        self._free.set()

    def send(self, sending: Callable[[], None]) -> None:
        """Call `sending` now, or as soon as the path is released."""
        if self._held is None:
            sending()
        else:
            self._held.append(sending)

    async def free(self) -> None:
        """Wait until the path is no longer held."""
        await self._free.wait()

    def hold(self) -> bool:
        if self._held is not None:
            return False
        self._held = deque()
        self._free.clear()
        return True

    def release(self) -> None:
        held, self._held = self._held or (), None
        for sending in held:
            sending()
        self._free.set()

    def forget(self) -> None:
        """Drop the data that waits while the path is held, and end the hold."""
        if self._held is not None:
            self._held.clear()
            self.release()


class _ConnectionEnd(asyncio.Transport):
    """The transport of one end of a connection in memory: sends data to the peer end, and gives received data to its protocol."""

    peer: "_ConnectionEnd"

    def __init__(self, loop: VirtualLoop, listener: _PathListener, protocol: asyncio.Protocol):
        super().__init__({"socket": SimpleNamespace(family=socket.AF_UNIX)})
        self.protocol = protocol
        self._loop = loop
        self._listener = listener
        # data that has arrived, but was not given to the protocol yet; an entry None says that the peer has closed the connection
        self._arrived: deque[bytes | None] = deque()
        self._under_way: deque[bytes | None] = deque()  # data on its way to the peer
        self._reading = True
        self._closing = False
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.abort()  # `close` need not wait for written data, because `write` sends it at once

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._send(None)
            self._loop.call_soon(self._lose)

    def cut(self) -> None:
        """End the connection without notifying the protocol of this side. The peer's protocol is notified after the delay."""
        if not self._closing:
            self._closing = self._over = True
            self._send(None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._receive)

    def get_write_buffer_size(self) -> int:
        return 0  # 0, because written data is sent at once and never buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, because written data is never buffered."""

    def take(self, data: bytes | None) -> None:
        """Receive data that the peer has sent; None means that the peer has closed the connection."""
        self._arrived.append(data)
        self._receive()

    def _send(self, data: bytes | None) -> None:
        self._listener.send(partial(self._depart, data))

    def _depart(self, data: bytes | None) -> None:
        self._under_way.append(data)
        self._loop.call_later(self._loop.delay / SECOND, self._arrive)

    def _arrive(self) -> None:
        self.peer.take(self._under_way.popleft())

    def _receive(self) -> None:
        while self._arrived and self._reading and not self._over:
            data = self._arrived.popleft()
            if data is not None:
                self.protocol.data_received(data)
            elif not self._closing:
                self.protocol.eof_received()
                self._closing = True
                self._lose()

    def _lose(self) -> None:
        if not self._over:
            self._over = True
            self.protocol.connection_lost(None)
