"""Virtual loop: an asyncio event loop in the simulator's virtual time."""

import asyncio

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_loop import Deadlocked, VirtualLoop

DELAY = 3 * MILLISECOND


def a_loop(seed=1):
    return VirtualLoop(Kernel(seed), DELAY)


class Heard(asyncio.Protocol):
    """A protocol that notes received data, with the instant of its arrival."""

    def __init__(self, loop):
        self.loop = loop
        self.events = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.events.append((self.loop.kernel.now(), data))

    def connection_lost(self, exc):
        self.events.append((self.loop.kernel.now(), exc))


def connected(loop, path="/there"):
    """Connect over the virtual loop, and return both ends: the client's and the server's."""
    far = []

    def made():
        far.append(Heard(loop))
        return far[0]

    loop.listen(path, made)
    _, near = loop.complete(loop.create_unix_connection(lambda: Heard(loop), path))
    return near, far[0]


def test_hour_passes_at_once_to_the_nanosecond():
    loop = a_loop()

    async def wait():
        for _ in range(3_000):
            await asyncio.sleep(1.2)
        return loop.time()

    assert loop.complete(wait()) == 3600.0
    assert loop.kernel.now() == 3600 * SECOND


@pytest.mark.parametrize("seed", range(5))
def test_tasks_wait_and_timeouts_pass(seed):
    loop = a_loop(seed)

    async def main():
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(done.wait())
            loop.call_later(2, done.set)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await asyncio.shield(waiting)
            assert loop.time() == 1.5
        return loop.time()

    assert loop.complete(main()) == 2.0


def test_endless_wait_raises_deadlocked():
    async def main():
        await asyncio.Event().wait()

    loop = a_loop()
    with pytest.raises(Deadlocked, match="nothing is ready"):
        loop.complete(main())
    loop.cancel_all()
    loop.kernel.run()


def test_exception_of_task_or_callback_ends_run():
    loop = a_loop()

    async def break_later():
        await asyncio.sleep(1)
        raise KeyError("later")

    loop.begin(break_later())
    with pytest.raises(KeyError, match="later"):
        loop.kernel.run()

    loop = a_loop()
    loop.call_later(1, {}.pop, "gone")
    with pytest.raises(KeyError, match="gone"):
        loop.kernel.run()


@pytest.mark.parametrize("seed", range(5))
def test_data_arrives_after_delay_before_the_end(seed):
    loop = a_loop(seed)
    near, far = connected(loop)
    written = loop.kernel.now()

    near.transport.write(b"one")
    near.transport.writelines([b"t", b"wo"])
    near.transport.close()
    near.transport.write(b"never")
    loop.kernel.run()

    came = written + DELAY
    assert far.events == [(came, b"one"), (came, b"two"), (came, None)]
    assert near.events == [(written, None)]


def test_paused_reader_gets_data_on_resume():
    loop = a_loop()
    near, far = connected(loop)
    far.transport.pause_reading()
    near.transport.write(b"one")
    near.transport.close()
    loop.call_later(1, far.transport.resume_reading)
    loop.kernel.run()
    assert [what for _, what in far.events] == [b"one", None]
    assert {when for when, _ in far.events} == {2 * DELAY + SECOND}


def test_killed_process_closes_only_its_peers():
    loop = a_loop()
    near, far = connected(loop)
    far.transport.write(b"last words")
    loop.cut("/there")
    far.transport.write(b"never")
    near.transport.write(b"to nobody")
    loop.kernel.run()
    assert [what for _, what in near.events] == [b"last words", None]
    assert far.events == []
    with pytest.raises(ConnectionRefusedError, match="nobody listens at /there"):
        loop.complete(loop.create_unix_connection(lambda: Heard(loop), "/there"))


def test_loop_has_no_sockets_or_threads():
    loop = a_loop()

    async def main():
        with pytest.raises(NotImplementedError):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(NotImplementedError):
            await asyncio.to_thread(print)

    loop.complete(main())


def test_cancelled_timers_do_nothing():
    loop = a_loop()
    happened = []
    loop.call_later(1, happened.append, "cancelled").cancel()
    loop.call_at(2, happened.append, "kept")
    loop.kernel.run()
    assert happened == ["kept"]
    assert loop.kernel.now() == Nanos(2 * SECOND)


def test_held_path_delays_data_in_both_directions():
    loop = a_loop()
    near, far = connected(loop)
    began = loop.kernel.now()
    near.transport.write(b"under way")
    assert loop.hold("/there")
    assert not loop.hold("/there")
    near.transport.write(b"one")
    far.transport.write(b"three")
    near.transport.write(b"two")
    loop.kernel.after(SECOND, lambda: loop.release("/there"))
    loop.kernel.run()
    late = began + SECOND + DELAY
    assert far.events == [(began + DELAY, b"under way"), (late, b"one"), (late, b"two")]
    assert near.events == [(late, b"three")]
    assert not loop.hold("/nowhere")


def test_connecting_waits_while_path_is_held():
    loop = a_loop()
    loop.listen("/there", lambda: Heard(loop))
    loop.hold("/there")
    loop.kernel.after(SECOND, lambda: loop.release("/there"))

    async def connect():
        await loop.create_unix_connection(lambda: Heard(loop), "/there")
        return loop.kernel.now()

    assert loop.complete(connect()) == SECOND


def test_kill_drops_held_data_but_closes_connections():
    loop = a_loop()
    near, far = connected(loop)
    loop.hold("/there")
    far.transport.write(b"last words")
    at = loop.kernel.now()
    loop.cut("/there")
    loop.release("/there")
    loop.kernel.run()
    assert near.events == [(at + DELAY, None)]


def test_abandoned_loop_has_no_tasks():
    loop = a_loop()
    said = []

    async def stubborn():
        try:
            await asyncio.sleep(SECOND)
        except asyncio.CancelledError:
            said.append("cancelled")
            await asyncio.sleep(10)

    async def failing():
        try:
            await asyncio.sleep(SECOND)
        finally:
            raise ValueError("at the end")

    tasks = [loop.begin(stubborn()), loop.begin(failing())]
    loop.kernel.run(until=Nanos(5))
    loop.abandon()
    assert said == ["cancelled"]
    assert all(task.done() for task in tasks)
