"""etcd directory: one key per worker; each key has a lease, and etcd deletes the key when the lease ends.

Rules:

1. A key belongs to the etcd lease under which it was last written. A process deregisters by ending its own lease. So if a
   newer process has written the key under its own lease, the key stays when the lease of the older process ends.
2. The key belongs to the incarnation that started last. A worker keeps its lease alive and checks each time that the
   key is still under this lease. If the key is missing, the worker writes it again. If the key is under another lease,
   the worker has been replaced.
3. A router reads all keys, watches changes for a third of a lease, and reads all keys again. Every key that it reads is
   valid, because etcd deletes the keys whose lease has ended. If a watch fails silently, changes are noticed at most a
   third of a lease later. A compaction of etcd's history ends the watch, and the router reads all keys again.
4. An etcd member that is cut off from the others may have old data. Therefore reads are linearizable, and watches
   require that the member has a leader.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote

import grpc
import msgspec
from aetcd import rpc
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.discovery import EtcdDiscovery, WorkerRecord
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import DirectoryListing, DirectoryReading, RecordMissing, RecordSeen
from fleet.membership.ports import DirectoryUnreachable, RegistryUnreachable, WorkerSuperseded
from fleet.net.etcd import CALL_SECONDS, EtcdChannels, etcd_error_text

log = logging.getLogger(__name__)

ROUNDS = 3  # number of times that all keys are read during one lease
LEADER = (("hasleader", "true"),)


class EtcdRegistrationKey(Struct, frozen=True):
    """The etcd lease under which this process has written the key of a worker."""

    lease: int


class EtcdDirectory:
    """Publishes workers in etcd, and reads the published workers.

    Implements `Registry` and `Directory` of `fleet.membership.ports`.

    It is an async context manager that owns its channels.
    """

    def __init__(self, settings: EtcdDiscovery) -> None:
        """Prepare the client; no connection is opened yet.

        Raises:
            ConfigurationRefused: A file of `credentials` cannot be read.
        """
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._channels = EtcdChannels(settings.endpoints, settings.credentials, "discovery")
        self._held: dict[tuple[WorkerId, Incarnation], EtcdRegistrationKey] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channels.close()

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        record = WorkerRecord(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            lease_seconds=self._settings.lease_seconds,
        )
        try:
            await self._channels.call(lambda channel: self._publish(channel, record))
        except grpc.aio.AioRpcError as error:
            raise RegistryUnreachable(etcd_error_text(error)) from error
        return record.lease

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        held = self._held.pop((worker_id, incarnation), None)
        if held is None:
            return
        try:
            await self._channels.call(lambda channel: _end_lease(channel, held.lease))
        except grpc.aio.AioRpcError as error:
            raise RegistryUnreachable(etcd_error_text(error)) from error

    async def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        try:
            found = await self._channels.call(self._all)
            yield DirectoryListing(all=tuple(seen for pair in found.kvs if (seen := self._seen(pair)) is not None))
            async for event in self._changes(found.header.revision + 1):
                if event.type == rpc.Event.DELETE:
                    if (worker_id := self._named(event.kv.key)) is not None:
                        yield RecordMissing(worker_id=worker_id)
                elif (seen := self._seen(event.kv)) is not None:
                    yield seen
        except grpc.aio.AioRpcError as error:
            raise DirectoryUnreachable(etcd_error_text(error)) from error
        except TimeoutError as error:
            raise DirectoryUnreachable("etcd: it does not take a watch") from error

    async def _publish(self, channel: grpc.aio.Channel, record: WorkerRecord) -> None:
        """Write the key of a worker. If this process has written the key before, renew its lease, and write the key again if it is gone.

        Raises:
            WorkerSuperseded: Another process owns the key.
            AioRpcError: A call to etcd failed.
        """
        me = (record.worker_id, record.incarnation)
        held = self._held.get(me)
        key = self._key(record.worker_id)
        value = msgspec.json.encode(record)
        if held is None:
            lease = await _begin_lease(channel, record.lease_seconds)
            await rpc.KVStub(channel).Put(rpc.PutRequest(key=key, value=value, lease=lease), timeout=CALL_SECONDS)
            self._held[me] = EtcdRegistrationKey(lease)
            return
        if not await _keep_alive(channel, held.lease):
            held = self._held[me] = EtcdRegistrationKey(await _begin_lease(channel, record.lease_seconds))
        ours = rpc.Compare(target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, key=key, lease=held.lease)
        nobodys = rpc.Compare(target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, key=key, create_revision=0)
        write = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=held.lease))
        anew = rpc.TxnRequest(compare=[nobodys], success=[write])
        answer = await rpc.KVStub(channel).Txn(
            rpc.TxnRequest(compare=[ours], failure=[rpc.RequestOp(request_txn=anew)]), timeout=CALL_SECONDS
        )
        if not answer.succeeded and not answer.responses[0].response_txn.succeeded:
            del self._held[me]
            await _end_lease(channel, held.lease)
            raise WorkerSuperseded(
                f"{record.worker_id} is held by a newer process; every worker needs an id of its own"
            )

    async def _all(self, channel: grpc.aio.Channel) -> Any:
        asked = rpc.RangeRequest(key=self._prefix, range_end=_after(self._prefix))
        return await rpc.KVStub(channel).Range(asked, timeout=CALL_SECONDS)

    async def _changes(self, revision: int) -> AsyncIterator[Any]:
        """Yield the changes since a revision, for a third of a lease or until the watch ends."""
        created = rpc.WatchCreateRequest(
            key=self._prefix, range_end=_after(self._prefix), start_revision=revision, progress_notify=False
        )
        over = asyncio.get_running_loop().time() + self._settings.lease_seconds / ROUNDS
        watch = rpc.WatchStub(self._channels.current).Watch(metadata=LEADER)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await watch.write(rpc.WatchRequest(create_request=created))
            while True:
                try:
                    async with asyncio.timeout_at(over):
                        answer = await watch.read()
                except TimeoutError:
                    return
                if answer is grpc.aio.EOF or answer.canceled:
                    # etcd's history was compacted, or etcd has no leader. If no leader is elected, the next read fails.
                    return
                for event in answer.events:
                    yield event
        finally:
            watch.cancel()

    def _key(self, worker_id: WorkerId) -> bytes:
        return self._prefix + quote(worker_id, safe="").encode()

    def _named(self, key: bytes) -> WorkerId | None:
        """Return the id of the worker to which a key belongs; None if the key does not have the form of a worker's key."""
        worker_id = WorkerId(unquote(key[len(self._prefix) :], errors="replace"))
        return worker_id if self._key(worker_id) == key else None

    def _seen(self, pair: Any) -> RecordSeen | None:
        """Return the record in the value of a key; None if the value is no record of the key's worker."""
        try:
            record = msgspec.json.decode(pair.value, type=WorkerRecord)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            log.warning("key ignored, its value is not a worker record", extra={"key": pair.key[:200]})
            return None
        return RecordSeen(record=record) if self._key(record.worker_id) == pair.key else None


async def _begin_lease(channel: grpc.aio.Channel, seconds: int) -> int:
    answer = await rpc.LeaseStub(channel).LeaseGrant(rpc.LeaseGrantRequest(TTL=seconds), timeout=CALL_SECONDS)
    granted: int = answer.ID
    return granted


async def _keep_alive(channel: grpc.aio.Channel, lease: int) -> bool:
    """Renew a lease; return True if it still exists."""
    call = rpc.LeaseStub(channel).LeaseKeepAlive(iter([rpc.LeaseKeepAliveRequest(ID=lease)]), timeout=CALL_SECONDS)
    try:
        answer = await call.read()
    finally:
        call.cancel()
    return answer is not grpc.aio.EOF and answer.TTL > 0


async def _end_lease(channel: grpc.aio.Channel, lease: int) -> None:
    try:
        await rpc.LeaseStub(channel).LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise


def _after(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with this prefix, as etcd expects it: the first key after the range."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
