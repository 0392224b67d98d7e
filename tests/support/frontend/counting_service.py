"""gRPC service of raw bytes that counts its calls, for tests of servers."""

import asyncio

import grpc
import pytest


class CountingService:
    def __init__(self):
        self.began = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def thrice(self, content, context):
        for _ in range(3):
            await context.write(content)

    async def wait(self, content, context):
        self.began += 1
        try:
            await self.go.wait()
            await context.write(content)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def late_echo(self, messages, context):
        async for message in messages:
            await context.write(message)

    async def one(self, content, context):
        self.began += 1
        if content == b"bug":
            raise ZeroDivisionError("bug")
        context.set_trailing_metadata((("x-bin", b"\x00\xff"), ("y", "z")))
        return b",".join(
            value if isinstance(value, bytes) else value.encode()
            for key, value in context.invocation_metadata()
            if key[0] == "x"
        )

    async def never(self, content, context):
        self.began += 1
        await asyncio.Event().wait()

    async def endless(self, content, context):
        self.began += 1
        try:
            while True:
                await context.write(content)
        finally:
            self.cancelled += 1

    async def echo(self, messages, context):
        await self.go.wait()
        async for message in messages:
            await context.write(message)

    def handlers(self):
        """Return the handlers of the service `x.Y`."""
        methods = {
            "Thrice": grpc.unary_stream_rpc_method_handler(self.thrice),
            "Wait": grpc.unary_stream_rpc_method_handler(self.wait),
            "One": grpc.unary_unary_rpc_method_handler(self.one),
            "Never": grpc.unary_stream_rpc_method_handler(self.never),
            "Endless": grpc.unary_stream_rpc_method_handler(self.endless),
            "LateEcho": grpc.stream_stream_rpc_method_handler(self.late_echo),
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
        }
        return (grpc.method_handlers_generic_handler("x.Y", methods),)


async def status_of(call):
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    return raised.value.code()
