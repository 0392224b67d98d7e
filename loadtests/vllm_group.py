"""Test of a worker group: one real vLLM engine in two worker processes, which play the roles of two nodes.

``python -m loadtests.vllm_group`` starts two worker processes on loopback for each way of spreading an engine, and checks four
things. The tokens equal those of an engine in one process. If one rank is killed, the other rank ends. If only the second rank is asked to
stop, both ranks drain. If the second rank dies during the start, the lead rank gives up. The test prints a JSON object for each case, and
ends with status 1 if a check fails.

It does not test pipeline stages, several hosts, or accelerators. Pipeline stages crash the CPU engine of vLLM 0.32 at the first request,
also on one node. For accelerators, vLLM sets up collective operations (NCCL) differently.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from fleet.core.ids import ModelName, WorkerId
from fleet.local.tiny_model import build_tiny_model
from kvstore.security.credentials import Credentials
from tests.support.builders import token_bytes
from tests.support.workers.engine_driver import an_attempt
from tests.support.workers.worker_processes import a_router_stream
from workers.settings import GroupSettings, VllmSettings, WorkerSettings

START_SECONDS = 300
END_SECONDS = 60
ANSWER_SECONDS = 60
PORT = 17_411  # port of the lead rank; it must be free
ITS_PROCESSES = 2  # child processes of a rank: the resource tracker of multiprocessing, and the engine's scheduler
TOKENS = 12
PROMPTS = [[7 + 13 * number + place % 911 for place in range(90 + 40 * number)] for number in range(4)]
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}


class GroupEnding(Struct, frozen=True):
    """One way to end a group: a signal to one rank, and the expected exit statuses."""

    victim: int  # rank that gets the signal
    sent: signal.Signals
    exits: list[int]  # expected exit status of each rank, as in `subprocess`


EARLY = "rank killed while the engine starts"
ENDS = {
    "rank told": GroupEnding(1, signal.SIGTERM, [0, 0]),
    "rank killed": GroupEnding(1, signal.SIGKILL, [1, -9]),
    "leader killed": GroupEnding(0, signal.SIGKILL, [-9, 1]),
    EARLY: GroupEnding(1, signal.SIGKILL, [1, -9]),
}


class GroupProcess:
    """Starts the worker process of one rank, with settings and log in a folder, and waits for its end."""

    def __init__(self, folder: Path, settings: WorkerSettings) -> None:
        self._config = folder / f"{settings.worker_id}.json"
        self._config.write_bytes(msgspec.json.encode(settings))
        self._log = self._config.with_suffix(".log")
        self.endpoints: dict[str, str] = {}

    async def start(self) -> None:
        command = ("-m", "fleet.cli.main", "serve", "worker", "--config", str(self._config))
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=log
            )

    async def ready(self) -> None:
        """Wait until the worker has printed its endpoints. vLLM prints other lines before them, which are skipped."""
        assert self.process.stdout is not None
        said, endpoints = [], b""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not endpoints and (line := await self.process.stdout.readline()):
                    said.append(line.decode())
                    endpoints = line[line.find(b'{"') :] if b'"grpc":' in line else b""
        except TimeoutError:
            said.append(f"nothing more in {START_SECONDS} s")
        if not endpoints:
            raise SystemExit(f"a worker is not ready:\n{self._log.read_text()[-3000:]}\n{''.join(said)[-3000:]}")
        self.endpoints = json.loads(endpoints)

    async def has_children(self) -> None:
        """Wait until the engine has started its own processes."""
        async with asyncio.timeout(START_SECONDS):
            while len(psutil.Process(self.process.pid).children()) < ITS_PROCESSES:  # noqa: ASYNC110 - there is no notification
                await asyncio.sleep(0.1)

    async def ended(self) -> int:
        async with asyncio.timeout(END_SECONDS):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def a_worker(model: Path, name: str, extra: dict[str, Any], group: GroupSettings | None) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId(name),
        model_dir=str(model),
        model=ModelName("tiny"),
        control_listen="127.0.0.1:0",
        control_credentials=Credentials(insecure=True),
        vllm=VllmSettings(kv_cache_gib=0.25, dtype="float32", extra_args=extra),
        group=group,
    )


async def answers(stream_address: str) -> list[list[int]]:
    async with a_router_stream(stream_address) as stream, asyncio.timeout(ANSWER_SECONDS):
        return [list((await stream.do(an_attempt(token_bytes(prompt), TOKENS)))[0]) for prompt in PROMPTS]


async def on_one_node(model: Path, folder: Path) -> list[list[int]]:
    single = GroupProcess(folder, a_worker(model, "single", {}, None))
    await single.start()
    try:
        await single.ready()
        return await answers(single.endpoints["stream"])
    finally:
        await single.close()


async def a_life(model: Path, folder: Path, way: str, how: str) -> dict[str, Any]:
    """Start one group, let it answer, and end it in the way that `how` names in `ENDS`."""
    both = [GroupProcess(folder, a_worker(model, f"{way}-{how}-{rank}", WAYS[way], a_group(rank))) for rank in range(2)]
    async with AsyncExitStack() as held:
        began = time.monotonic()
        for each in both:
            await each.start()
            held.push_async_callback(each.close)
        if how == EARLY:
            await both[0].has_children()
            return {"exits": await ended_by(both, how)}
        for each in both:
            await each.ready()
        found: dict[str, Any] = {"start_seconds": round(time.monotonic() - began, 1)}
        found["tokens"] = await answers(both[0].endpoints["stream"])
        ended = time.monotonic()
        found["exits"] = await ended_by(both, how)
        return found | {"end_seconds": round(time.monotonic() - ended, 1)}


async def ended_by(both: list[GroupProcess], how: str) -> list[int]:
    both[ENDS[how].victim].process.send_signal(ENDS[how].sent)
    return [await each.ended() for each in both]


def a_group(rank: int) -> GroupSettings:
    return GroupSettings(nodes=2, rank=rank, leader=f"127.0.0.1:{PORT}", silence_ms=10_000)


async def main(ways: list[str]) -> int:
    good = True
    with tempfile.TemporaryDirectory(prefix="fleet-group-") as name:
        folder = Path(name)
        model = build_tiny_model(folder)
        expected = await on_one_node(model, folder)
        for way in ways:
            for how, end in ENDS.items():
                found = await a_life(model, folder, way, how)
                if how != EARLY:
                    found["same_tokens"] = found.pop("tokens") == expected
                found["as_it_should"] = found["exits"] == end.exits
                good &= found["as_it_should"] and found.get("same_tokens", True)
                print(json.dumps({"way": way, "end": how} | found), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS) + "; all of them where none is named")
    sys.exit(asyncio.run(main(parser.parse_args().ways or list(WAYS))))
