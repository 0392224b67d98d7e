"""Test of fair queueing: flooding tenants share the computed tokens by their weights."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from random import Random

import pytest

from fleet.router.tenants import TenantSettings
from tests.support.backends.openai_servers import MODEL, OpenAiServer, RelaySetup, ServerExchange, a_relay, five_tokens
from tests.support.frontend.http_clients import RawHttpClient, post
from tests.support.waiting import until

pytestmark = pytest.mark.integration

PIECE = 256  # bytes of text per compared piece, which stand for 64 tokens without a tokenizer
KEYS = {"gold": "sk-gold", "silver": "sk-silver", "other": "sk-other"}
WEIGHTS = {"gold": 3.0, "silver": 2.0, "other": 1.0}
TENANTS = {
    name: TenantSettings(api_key_sha256=(sha256(key.encode()).hexdigest(),), weight=WEIGHTS[name])
    for name, key in KEYS.items()
}
PIECES = {"gold": (1, 3), "silver": (4, 7), "other": (2, 5)}
"""Range of the number of pieces of one prompt that no other prompt has."""

REQUESTS = {"gold": 250, "silver": 90, "other": 80}
SHARED = "s" * (10 * PIECE)
"""Common prefix of all prompts of silver: computed and charged once."""

COUNTED = 600  # pieces; every tenant still has more than that


def prompts(name: str, dice: Random) -> Iterator[str]:
    """Return all prompts of a tenant."""
    for number in range(REQUESTS[name]):
        own = f"{name}{number:06}".ljust(16, ".") * (PIECE // 16 * dice.randint(*PIECES[name]))
        yield (SHARED if name == "silver" else "") + own


async def flood(world: RelaySetup, name: str, prompt: str) -> int:
    """Return the status of one request on its own connection."""
    host, _, port = world.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = f"authorization: Bearer {KEYS[name]}"
    try:
        await RawHttpClient(reader, writer).send(post("/v1/completions", {"model": MODEL, "prompt": prompt}, key))
        status, _, _ = await RawHttpClient(reader, writer).answer()
    finally:
        writer.close()
    return status


async def test_flooding_tenants_share_compute_by_their_weights():
    """Allow 5 %, whatever the sizes and numbers of the prompts and the cached share."""
    go = asyncio.Event()
    dice = Random(3)
    server = OpenAiServer()
    computed: list[tuple[str, int]] = []  # pieces in the order in which the server received them

    async def when_let(exchange: ServerExchange) -> None:
        own = exchange.seen.json["prompt"].removeprefix(SHARED)
        computed.append((next(name for name in KEYS if own.startswith(name)), len(own) // PIECE))
        await go.wait()
        await five_tokens(exchange)

    server.play = when_let
    await server.start()
    limits = {"tenants": TENANTS, "oversubscribe": 1.0, "max_queue_seconds": 1e6}
    async with a_relay(server, tenants=TENANTS, limits=limits, max_running=2) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(flood(world, name, prompt)) for name in KEYS for prompt in prompts(name, dice)]
            await until(lambda: world.router.status().queued == len(asking) - 2)
            computed.clear()
            go.set()
        assert {each.result() for each in asking} == {200}
        await world.settled()
    await server.stop()

    shares: Counter[str] = Counter()
    for name, pieces in computed:
        shares[name] += pieces
        if shares.total() >= COUNTED:
            break
    assert all(shares[name] < sum(pieces for each, pieces in computed if each == name) for name in KEYS)
    for name, weight in WEIGHTS.items():
        assert shares[name] / shares.total() == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.05)
