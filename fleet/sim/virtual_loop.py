"""An event loop of asyncio in the kernel's time: what is written for asyncio runs among the simulation's events, and never waits.

Rules:

1. Callbacks that are ready have a turn, which is an event of the kernel at the present instant; timers are events too. So time
   jumps when nothing is ready, timers of one instant go in an order that the kernel's seed draws, and callbacks in the order in
   which they became ready, as in every event loop.
2. Time is whole nanoseconds. A timer's instant, which asyncio gives in seconds, is rounded to the nearest one: two spans that
   are equal in nanoseconds end at the same instant.
3. `create_unix_connection` reaches whoever listens at that path on this loop (`listen`), in memory: no file, no socket. What one
   end writes reaches the other a `delay` later, in order and in pieces as they were written. An end of the connection, orderly
   or not, does too, after what was written before it. While a path is held (`hold`), what is written waits, both ways.
4. What a callback raises ends the kernel's run: nothing is left to be trusted.
5. What would leave the process or wait for it (sockets, threads, signals, subprocesses) raises `NotImplementedError`.
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
"""Of what tasks do after they were cancelled, when all are to end."""


class Deadlocked(Exception):
    """Nothing can happen any more, and what was to be done is not done."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs while its kernel does; `complete` runs the kernel for one coroutine."""

    def __init__(self, kernel: Kernel, delay: Nanos):
        """A loop in which nothing runs yet.

        Args:
            kernel: Its time.
            delay: Of what is written to a connection, one way.
        """
        self.kernel = kernel
        self.delay = delay
        self._ready: deque[asyncio.Handle] = deque()
        self._turn_set = False
        self._listening: dict[str, _PathListener] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._running = False
        self._fault: BaseException | None = None

    def complete(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run the kernel until nothing happens any more, and return what `main` has returned by then.

        Raises:
            Deadlocked: It has not.
        """
        task = self.create_task(main)
        self.kernel.run()
        if not task.done():
            raise Deadlocked(f"at {self.time():.9f} s nothing is ready and no timer is set")
        return task.result()

    def begin(self, main: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """A task of the loop's own: what it raises ends the kernel's run."""
        task = self.create_task(main)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error

    def cancel_all(self) -> None:
        """Cancel every task, at the next turn."""
        for task in self._tasks:
            task.cancel()

    def abandon(self) -> None:
        """End every task now, whatever they still do; time stands still, and nothing can run afterwards.

        For a run that was broken off: tasks that are just forgotten complain when they are cleared away.
        """
        self._listening.clear()
        for _ in range(LAST_ROUNDS):
            self.cancel_all()
            self._fault = None
            with suppress(BaseException):  # supervisor: what ends here has failed already
                self.turn()
            if not self._tasks:
                return

    # Turns.

    def turn(self) -> None:
        """Have all who are ready go on now, and those who become ready by that; not from within a turn."""
        assert not self._running
        self._turn_set = False
        ready = self._ready
        asyncio._set_running_loop(self)  # noqa: SLF001 - asyncio's own door for other loops
        self._running = True
        try:
            while ready and self._fault is None:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()  # noqa: SLF001 - asyncio has no other name for it
        finally:
            self._running = False
            asyncio._set_running_loop(None)  # noqa: SLF001 - as above
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
        """A callback has raised, or nobody has looked at what a task raised."""
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
        """For asyncio; a cancelled timer does nothing when its turn comes."""

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
        """Have those who connect to `path` from now on find a new protocol there."""
        assert path not in self._listening, path
        self._listening[path] = _PathListener(made)

    def cut(self, path: str) -> None:
        """Nobody listens there any more, and connections end, as when the process is killed: its ends are told nothing."""
        listener = self._listening.pop(path)
        listener.forget()
        for end in listener.ends:
            end.cut()

    def hold(self, path: str) -> bool:
        """Let nothing pass to or from those who listen there, until `release`; whether that is new, and somebody listens."""
        listener = self._listening.get(path)
        return listener is not None and listener.hold()

    def release(self, path: str) -> None:
        """Send on what was held back, in order; nothing where nobody listens any more."""
        if (listener := self._listening.get(path)) is not None:
            listener.release()

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Takes a way there and back.

        Raises:
            ConnectionRefusedError: Nobody listens at `path`.
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
    """Those who listen at a path, and all that goes to and from there."""

    def __init__(self, made: Callable[[], asyncio.Protocol]):
        self.made = made
        self.ends: list[_ConnectionEnd] = []
        self._held: deque[Callable[[], None]] | None = None  # what is to be sent when nothing is held any more
        self._free = asyncio.Event()
        self._free.set()

    def send(self, sending: Callable[[], None]) -> None:
        """Do it, now or when nothing is held any more."""
        if self._held is None:
            sending()
        else:
            self._held.append(sending)

    async def free(self) -> None:
        """Wait until nothing is held."""
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
        """Lose what is held."""
        if self._held is not None:
            self._held.clear()
            self.release()


class _ConnectionEnd(asyncio.Transport):
    """One end of a connection in memory."""

    peer: "_ConnectionEnd"

    def __init__(self, loop: VirtualLoop, listener: _PathListener, protocol: asyncio.Protocol):
        super().__init__({"socket": SimpleNamespace(family=socket.AF_UNIX)})
        self.protocol = protocol
        self._loop = loop
        self._listener = listener
        self._arrived: deque[bytes | None] = deque()  # and not received yet; None: the other end has ended
        self._under_way: deque[bytes | None] = deque()  # to the other end
        self._reading = True
        self._closing = False
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.abort()  # what was written is under way already

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._send(None)
            self._loop.call_soon(self._lose)

    def cut(self) -> None:
        """End both ends: this one notices nothing, the other does a way later."""
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
        return 0  # all is under way at once

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing ever waits to be written."""

    def take(self, data: bytes | None) -> None:
        """Something has come from the other end."""
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
