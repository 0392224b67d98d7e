"""Tests share grpc's only poller between their event loops."""

import asyncio

import grpc
import pytest
import uvloop

from tests.support.planner.connectors import silent_port
from tests.support.waiting import until


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_late_call_end_does_not_disturb_the_next_event_loop(new_loop, caplog):
    def run(main):
        loop = new_loop()
        try:
            return loop.run_until_complete(main)
        finally:
            loop.close()

    async def a_call(port):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return channel, channel.unary_unary("/a/b")(b"")

    async def left(port):
        channel, call = await a_call(port)
        await until(lambda: channel.get_state() is grpc.ChannelConnectivity.CONNECTING)  # the call has begun
        call.cancel()
        return channel

    async def the_next(port):
        channel, call = await a_call(port)
        await asyncio.wait([asyncio.ensure_future(call.code())], timeout=0.5)  # late events arrive meanwhile
        call.cancel()
        await channel.close()

    with silent_port() as port:
        kept = [run(left(port)) for _ in range(5)]
        run(the_next(port))

    assert len(kept) == 5
    assert caplog.records == []
