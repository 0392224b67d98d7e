"""Spending ledgers: those in memory and in a file keep the same promises, and several processes can share a file."""

import asyncio
import fcntl
import multiprocessing

import pytest

from fleet.backends.hosted.ledger import FileLedger, MemoryLedger

LIMIT = 1000
NOW = 1_800_000_000


class WallClock:
    def __init__(self):
        self.seconds = NOW

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return WallClock()


@pytest.fixture(params=["memory", "file"])
def ledger(request, tmp_path, clock):
    if request.param == "memory":
        yield MemoryLedger(LIMIT, clock)
        return
    ledger = FileLedger(tmp_path / "ledger.json", LIMIT, clock)
    yield ledger
    ledger.close()


async def test_ledger_admits_up_to_its_limit_and_refunds(ledger):
    began = await ledger.reserve(800)
    assert began == NOW // 60
    assert await ledger.reserve(300) is None
    assert not ledger.has_room(300)
    await ledger.settle(began, 800, 100)
    assert ledger.spent() == 100
    assert ledger.has_room(900)
    assert not ledger.has_room(901)


async def test_charges_end_after_an_hour(ledger, clock):
    await ledger.reserve(1000)
    clock.seconds += 60 * 61
    assert ledger.spent() == 0
    assert await ledger.reserve(1000) is not None


async def test_spending_outlives_the_process(tmp_path, clock):
    first = FileLedger(tmp_path / "ledger.json", LIMIT, clock)
    await first.reserve(700)
    first.close()
    second = FileLedger(tmp_path / "ledger.json", LIMIT, clock)
    assert await second.reserve(400) is None
    assert second.spent() == 700
    second.close()


def _spend(path, estimate, wins):
    async def spend():
        ledger = FileLedger(path, LIMIT, lambda: NOW)
        got = 0
        for _ in range(200):
            began = await ledger.reserve(estimate)
            if began is not None:
                got += estimate
        ledger.close()
        return got

    wins.put(asyncio.run(spend()))


def test_processes_together_stay_within_the_limit(tmp_path):
    context = multiprocessing.get_context("fork")
    wins = context.Queue()
    spenders = [context.Process(target=_spend, args=(tmp_path / "ledger.json", 7, wins)) for _ in range(3)]
    for each in spenders:
        each.start()
    spent = [wins.get(timeout=60) for _ in spenders]
    for each in spenders:
        each.join(60)
    assert LIMIT - 7 < sum(spent) <= LIMIT


async def test_lock_of_a_stopped_process_loses_no_refund(tmp_path, clock):
    path = tmp_path / "ledger.json"
    ledger = FileLedger(path, LIMIT, clock)
    began = await ledger.reserve(900)
    with path.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert await ledger.reserve(10) is None
        await ledger.settle(began, 900, 200)
        assert ledger.spent() == 900
    assert ledger.spent() == 200
    ledger.close()


@pytest.mark.parametrize("content", [b"not json", b'{"a": 1}', b'{"29999999": -5'])
async def test_unreadable_file_counts_as_a_spent_limit(tmp_path, clock, content, caplog):
    path = tmp_path / "ledger.json"
    path.write_bytes(content)
    ledger = FileLedger(path, LIMIT, clock)
    assert await ledger.reserve(1) is None
    assert "spending ledger unreadable" in caplog.text
    clock.seconds += 60 * 61
    assert await ledger.reserve(1) is not None
    ledger.close()
