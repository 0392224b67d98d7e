"""Fault matrix: every impossible combination has a reason; a relay damages, delays and holds back the bytes that it forwards."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from fleet.core.work import KvEvents, KvStored, LoadReport
from fleet.wire.worker import encode_worker_message
from kvstore.net.frames import HEAD, FrameDecoder
from tests.faults import __main__ as command
from tests.faults import matrix
from tests.faults.matrix import CellPhase, Component, MatrixFault, why_impossible, why_impossible_phase
from tests.faults.relay import Relay, Spoiling
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import stays, until


def events(number):
    return encode_worker_message(KvEvents(sequence=number, events=(KvStored((bytes(16),)),))).SerializeToString()


LOAD = encode_worker_message(LoadReport(running=1, waiting=0, kv_blocks_used=3)).SerializeToString()


@asynccontextmanager
async def a_relay(sent):
    """Yield a relay to a server that sends these payloads as soon as a client connects, and the path of the relay's socket."""

    ended = []

    async def send(reader, writer):
        for payload in sent:
            writer.write(HEAD.pack(len(payload)) + payload)
        await reader.read()  # until the relay closes
        writer.close()
        await writer.wait_closed()
        ended.append(writer)

    with a_short_folder() as folder:
        server = await asyncio.start_unix_server(send, folder / "s")
        relay = Relay(folder / "r", str(folder / "s"), frames=True)
        async with server, relay.serve():
            yield relay, folder / "r"
            await until(lambda: ended)


async def received(path, count):
    """Connect to a socket, and return the first `count` payloads."""
    reader, writer = await asyncio.open_unix_connection(path)
    decoder, found = FrameDecoder(), []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += decoder.cut(await reader.read(1 << 16))
    writer.close()
    await writer.wait_closed()
    return found


@pytest.mark.parametrize(
    ("spoiling", "expected"),
    [
        (Spoiling.NOTHING, [events(0), LOAD, events(1), LOAD]),
        (Spoiling.DUPLICATE, [events(0), events(0), LOAD, events(1), events(1), LOAD]),
        (Spoiling.REORDER, [LOAD, events(0), LOAD, events(1)]),
    ],
)
async def test_relay_changes_only_frames_with_events(spoiling, expected):
    async with a_relay([events(0), LOAD, events(1), LOAD]) as (relay, path):
        relay.spoiling = spoiling

        assert await received(path, len(expected)) == expected
        assert relay.spoiled == (0 if spoiling is Spoiling.NOTHING else 2)


async def test_relay_corrupts_one_frame():
    async with a_relay([LOAD, LOAD]) as (relay, path):
        relay.spoiling = Spoiling.CORRUPT

        first, second = await received(path, 2)

        assert (first, second) == (b"\xff" * len(LOAD), LOAD)


async def test_cut_holds_bytes_back_until_it_heals():
    async with a_relay([LOAD]) as (relay, path):
        relay.cut()
        reading = asyncio.ensure_future(received(path, 1))
        await stays(lambda: not reading.done(), 0.1, "without the cut the bytes have arrived by now")

        relay.heal()

        assert await reading == [LOAD]


def test_every_combination_is_possible_or_has_a_reason(monkeypatch):
    monkeypatch.setattr(matrix.shutil, "which", lambda program: f"/usr/bin/{program}")

    possible = {
        (component, fault) for component in Component for fault in MatrixFault if not why_impossible(component, fault)
    }

    assert {fault for component, fault in possible if component is Component.DECODE} == set(MatrixFault) - set(
        matrix.ON_DISK
    )
    assert {fault for component, fault in possible if component is Component.REDIS} == {
        MatrixFault.KILL, MatrixFault.STOP, MatrixFault.STOP_6S,
    }  # fmt: skip
    assert (Component.STORE, MatrixFault.SLOW_DISK) in possible
    assert {component for component, _ in possible} == set(Component)
    assert why_impossible_phase(Component.PLANNER, CellPhase.DRAIN)
    assert not why_impossible_phase(Component.STORE, CellPhase.DRAIN)


def test_missing_program_makes_its_faults_impossible(monkeypatch):
    monkeypatch.setattr(matrix.shutil, "which", lambda _: None)

    assert "strace" in why_impossible(Component.STORE, MatrixFault.FULL_DISK)
    assert "redis-server" in why_impossible(Component.REDIS, MatrixFault.KILL)


def test_selection_takes_components_and_pairs():
    assert command.pairs(["planner", "decode:cut"]) == [
        (Component.DECODE, MatrixFault.CUT),
        *((Component.PLANNER, fault) for fault in MatrixFault),
    ]
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])


def test_broken_cell_makes_the_command_fail(monkeypatch, capsys):
    cell = command.failed_cell(Component.STORE, MatrixFault.KILL, CellPhase.IDLE, "2 tokens wrong")

    async def run_matrix(*_):
        return [cell]

    monkeypatch.setattr(command, "run_matrix", run_matrix)

    assert command.main(["--only", "store:kill"]) == 1
    assert "2 tokens wrong" in capsys.readouterr().out
    cell.broken = []
    assert command.main(["--only", "store:kill", "--json", "-"]) == 0
