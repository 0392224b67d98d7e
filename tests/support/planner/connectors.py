"""Test doubles for plan connectors: a fake orchestrator, a wrapper whose first write raises, and a silent port."""

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator

from tests.support.waiting import pace


class KilledOnWrite:
    """Wraps a connector's client; its first write raises, before or after the write is done, as if the caller died."""

    def __init__(self, behind, write: str, answered: bool, killed: type[BaseException]) -> None:
        self._behind, self._write, self._answered, self._killed = behind, write, answered, killed

    def __getattr__(self, name):
        call = getattr(self._behind, name)
        if name != self._write:
            return call

        async def write(*arguments):
            if self._answered:
                await call(*arguments)
            raise self._killed

        return write


class FakeOrchestrator:
    """Plays an orchestrator of another project, with room for a few replicas.

    It reads plans and writes plan reports in the documented format.

    `read` returns the plan's text, or empty bytes if there is no plan; `write` stores a report's text.
    """

    def __init__(self, room: int, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]):
        self._room, self._read, self._write = room, read, write
        self._ready = {"decode": 1, "prefill": 1}
        self._draining = dict.fromkeys(self._ready, 0)
        self.finishes = True

    async def run(self) -> None:
        while True:
            await self.step()
            await pace(0.01, "the period of the orchestrator")

    async def step(self) -> None:
        plan = json.loads(await self._read() or b'{"revision": 0, "pools": {}}')
        pools = {}
        for pool in self._ready:
            asked = plan["pools"].get(pool, {"replicas": 1})["replicas"]
            self._draining[pool] += max(0, self._ready[pool] - asked)
            self._ready[pool] = min(self._ready[pool], asked)
            if self.finishes:
                self._draining[pool] = 0
            left = self._room - sum(self._ready.values()) - sum(self._draining.values())
            self._ready[pool] += min(left, asked - self._ready[pool])
            pools[pool] = {"asked": asked, "ready": self._ready[pool], "draining": self._draining[pool]}
            if self._ready[pool] < asked:
                pools[pool] |= {"why": "no_room", "message": f"all {self._room} places are taken"}
        await self._write(json.dumps({"revision": plan["revision"], "pools": pools}).encode())


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]
