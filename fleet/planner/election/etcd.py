"""Etcd election: elects the candidate that owns a certain key in etcd.

Rules:

1. A candidate becomes the owner by creating the key, if the key does not exist. Etcd deletes the key when the owner's
   lease ends: `lease_seconds` after the last renewal of the lease.
2. The owner stops leading when two thirds of `lease_seconds` have passed since its last successful renewal. It measures
   this time by its own clock, from the instant before it sent the renewal. So the owner stops before etcd deletes the
   key, and there are never two leaders.
3. The owner also stops when it finds that another candidate owns the key, because somebody has deleted the key by hand.
   In this case only, there may be two leaders, until the owner's next renewal (every sixth of `lease_seconds`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Never

import grpc
from aetcd import rpc

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.etcd import CALL_SECONDS, EtcdChannels, etcd_error_text
from fleet.planner.settings import EtcdElectionSettings

log = logging.getLogger(__name__)


class EtcdElection:
    """Takes part in an election in etcd, as one candidate. Implements `fleet.planner.election.ports.PlanElection`."""

    def __init__(self, settings: EtcdElectionSettings, channels: EtcdChannels, identity: str, clock: Clock) -> None:
        self._settings = settings
        self._channels = channels
        self._identity = identity
        self._clock = clock
        self._lease: int | None = None
        self._until = Nanos(0)
        self._led = False

    def leads(self) -> bool:
        return self._clock.now() < self._until

    async def run(self) -> Never:
        trouble = ""
        while True:
            began = self._clock.now()
            try:
                owned = await self._channels.call(self._renew)
                self._until = Nanos(began + self._settings.lease_seconds * SECOND * 2 // 3 if owned else 0)
                trouble = ""
            except grpc.aio.AioRpcError as error:
                if (cause := etcd_error_text(error)) != trouble:
                    trouble = cause
                    log.warning("election key not renewed", extra={"cause": cause})
            if self.leads() != self._led:
                self._led = not self._led
                message = "leader election won" if self._led else "leader election lost"
                log.info(message, extra={"identity": self._identity})
            await asyncio.sleep(self._settings.lease_seconds / 6)

    async def give_back(self) -> None:
        """Stop leading, and end this candidate's lease, so that the next leader does not have to wait until the lease expires."""
        self._until = Nanos(0)
        if self._lease is None:
            return
        with suppress(grpc.aio.AioRpcError):
            await rpc.LeaseStub(self._channels.current).LeaseRevoke(
                rpc.LeaseRevokeRequest(ID=self._lease), timeout=CALL_SECONDS
            )

    async def _renew(self, channel: grpc.aio.Channel) -> bool:
        """Renew the lease, and create the key if it does not exist; return whether this candidate owns the key."""
        leases = rpc.LeaseStub(channel)
        if self._lease is not None:
            call = leases.LeaseKeepAlive(iter([rpc.LeaseKeepAliveRequest(ID=self._lease)]), timeout=CALL_SECONDS)
            try:
                answer = await call.read()
            finally:
                call.cancel()
            if answer is grpc.aio.EOF or answer.TTL <= 0:
                self._lease = None
        if self._lease is None:
            granted = await leases.LeaseGrant(
                rpc.LeaseGrantRequest(TTL=self._settings.lease_seconds), timeout=CALL_SECONDS
            )
            self._lease = granted.ID
        key = self._settings.key.encode()
        free = rpc.Compare(target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, key=key, create_revision=0)
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=self._identity.encode(), lease=self._lease))
        look = rpc.RequestOp(request_range=rpc.RangeRequest(key=key, limit=1))
        answer = await rpc.KVStub(channel).Txn(
            rpc.TxnRequest(compare=[free], success=[put], failure=[look]), timeout=CALL_SECONDS
        )
        if answer.succeeded:
            return True
        (found,) = answer.responses[0].response_range.kvs
        owned: bool = found.lease == self._lease
        return owned


@asynccontextmanager
async def open_etcd_election(
    settings: EtcdElectionSettings, identity: str, clock: Clock
) -> AsyncIterator[EtcdElection]:
    """Open a candidate for the key in the settings; when the context ends, the candidate resigns as leader.

    Raises:
        ConfigurationRefused: A file that `settings.credentials` names cannot be read.
    """
    channels = EtcdChannels(settings.endpoints, settings.credentials, "election")
    candidate = EtcdElection(settings, channels, identity, clock)
    try:
        yield candidate
    finally:
        await candidate.give_back()
        await channels.close()
