"""Plan and report as two keys in etcd.

A write is a transaction that asks whether the plan's key is still as it was read. Reads are linearizable: a member that is cut off from the
others answers nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import msgspec
from aetcd import rpc
from msgspec import Struct

from fleet.net.etcd import CALL_SECONDS, EtcdChannels, etcd_error_text
from fleet.planner.connectors.virtual import Intent, Kept, Report
from fleet.planner.ports import ConnectorUnreachable
from fleet.planner.settings import EtcdTarget

Record = TypeVar("Record", bound=Struct)


class EtcdRecords:
    """Implements `fleet.planner.connectors.virtual.Records`."""

    def __init__(self, channels: EtcdChannels, prefix: str) -> None:
        self._channels = channels
        self._plan = f"{prefix}plan".encode()
        self._report = f"{prefix}report".encode()

    async def read(self) -> Kept:
        both = rpc.TxnRequest(
            success=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=key, limit=1)) for key in (self._plan, self._report)
            ]
        )
        answer = await self._transaction(both)
        plan, report = (each.response_range.kvs for each in answer.responses)
        return Kept(
            intent=self._decoded(plan[0], Intent) if plan else Intent(),
            report=self._decoded(report[0], Report) if report else None,
            token=plan[0].mod_revision if plan else 0,  # as etcd says it of a key that is not there
        )

    async def write(self, intent: Intent, over: Kept) -> bool:
        unchanged = rpc.Compare(
            target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, key=self._plan, mod_revision=over.token
        )
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=self._plan, value=msgspec.json.encode(intent)))
        answer = await self._transaction(rpc.TxnRequest(compare=[unchanged], success=[put]))
        return bool(answer.succeeded)

    async def _transaction(self, asked: Any) -> Any:
        async def ask(channel: grpc.aio.Channel) -> Any:
            return await rpc.KVStub(channel).Txn(asked, timeout=CALL_SECONDS)

        try:
            return await self._channels.call(ask)
        except grpc.aio.AioRpcError as error:
            raise ConnectorUnreachable(etcd_error_text(error)) from error

    def _decoded(self, pair: Any, of: type[Record]) -> Record:
        try:
            return msgspec.json.decode(pair.value, type=of)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise ConnectorUnreachable(f"etcd: {pair.key.decode(errors='replace')}: {error}") from error


@asynccontextmanager
async def etcd_records(target: EtcdTarget) -> AsyncIterator[EtcdRecords]:
    """Raises ConfigurationRefused: a file of `credentials` cannot be read."""
    channels = EtcdChannels(target.endpoints, target.credentials, "connector")
    try:
        yield EtcdRecords(channels, target.prefix)
    finally:
        await channels.close()
