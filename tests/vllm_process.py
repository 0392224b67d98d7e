"""A process with a vLLM engine in it, as a worker is one: says that it is ready, and waits. Given its settings as JSON."""

import asyncio
import sys

import msgspec

from workers.engines.vllm import open_engine
from workers.settings import WorkerSettings


async def main() -> None:
    async with open_engine(msgspec.json.decode(sys.argv[1], type=WorkerSettings)):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
