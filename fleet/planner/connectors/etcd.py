"""Etcd records: stores the plan and the report in two keys of etcd.

A write is a transaction, which fails if the revision of the plan's key is not the one that was read before. Reads are
linearizable, so an etcd member that has lost the quorum does not answer with outdated records.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import msgspec
from aetcd import rpc
from msgspec import Struct

from fleet.net.etcd import CALL_SECONDS, EtcdChannels, etcd_error_text
from fleet.planner.connectors.virtual import Intent, PlanReport, RecordsSnapshot
from fleet.planner.ports import ConnectorUnreachable
from fleet.planner.settings import EtcdTarget

Record = TypeVar("Record", bound=Struct)


class EtcdRecords:
    """Stores the plan and the plan report in etcd. Implements `fleet.planner.connectors.virtual.PlanRecords`."""

    def __init__(self, channels: EtcdChannels, prefix: str) -> None:
        self._channels = channels
        self._plan = f"{prefix}plan".encode()
        self._report = f"{prefix}report".encode()

    async def read(self) -> RecordsSnapshot:
        both = rpc.TxnRequest(
            success=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=key, limit=1)) for key in (self._plan, self._report)
            ]
        )
        answer = await self._transaction(both)
        plan, report = (each.response_range.kvs for each in answer.responses)
        return RecordsSnapshot(
            intent=self._decoded(plan[0], Intent) if plan else Intent(),
            report=self._decoded(report[0], PlanReport) if report else None,
            token=plan[0].mod_revision if plan else 0,  # etcd reports revision 0 for a missing key
        )

    async def write(self, intent: Intent, over: RecordsSnapshot) -> bool:
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
    """Open the connection to etcd, and yield the plan records under the target's prefix.

    Raises:
        ConfigurationRefused: A file that `target.credentials` names cannot be read.
    """
    channels = EtcdChannels(target.endpoints, target.credentials, "connector")
    try:
        yield EtcdRecords(channels, target.prefix)
    finally:
        await channels.close()
