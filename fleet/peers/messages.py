"""Messages between routers: translates between Fleet's types and the protobuf messages of `fleet/v1/replica.proto`."""

from collections.abc import Iterable, Mapping, Sequence
from struct import pack, unpack

from msgspec import Struct, structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import Incarnation, WorkerId
from fleet.frontend.control.cluster import parse_thresholds
from fleet.membership.messages import Register, Registration
from fleet.router.kv_index.peer_prompts import MAX_ANNOUNCED_KEYS, PlacedPrompt
from fleet.router.kv_index.prefix_index import KEY_BYTES
from fleet.router.messages import ReservationTotals
from fleet.router.sessions import SessionBinding
from fleet.router.settings.router import Thresholds
from fleet.router.tenants import BucketLevels, TenantUsageDelta
from fleet.v1 import control_pb2
from fleet.v1 import replica_pb2 as pb

PROMPTS_A_MESSAGE = 1000  # maximum number of prompts in one message; 4 MB if all have the maximum length
# The highest age of a prompt, in milliseconds, that the message's field can hold (49 days). An older prompt is sent with this age.
MOST_AGE_MS = 0xFFFF_FFFF
MEMBERS_A_MESSAGE = 1000  # maximum number of members in one message, which then has about 100 kB
# maximum number of session bindings in one message; 2 MB if all names of sessions and tenants have the maximum length
BINDINGS_A_MESSAGE = 1000
LATEST = 1 << 62  # latest time that is accepted from a peer, in nanoseconds of Unix time; it is in the year 2116
MOST_TAKEN = 1e15  # maximum number of requests or tokens of one tenant in one message; a message with more is invalid
# Maximum number of blocks that one router has reserved on a worker, so that sums over all routers stay finite. A message with more is invalid.
MOST_BLOCKS = 1e15


class PeerThresholds(Struct, frozen=True):
    """Changed thresholds, and the time of the change in milliseconds of Unix time."""

    thresholds: Thresholds
    at_unix_ms: int


def encode_thresholds(tuned: PeerThresholds) -> pb.ReplicaMessage:
    thresholds = control_pb2.Thresholds(**structs.asdict(tuned.thresholds))
    return pb.ReplicaMessage(tuned=pb.ReplicaTuned(thresholds=thresholds, at_unix_ms=tuned.at_unix_ms))


def encode_registered(event: Register | Registration) -> control_pb2.RegisterRequest:
    return control_pb2.RegisterRequest(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)


def decode_registered(message: control_pb2.RegisterRequest) -> Register:
    """Decode the registration of a worker with another router.

    Raises:
        ConnectionError: The message is no valid registration.
    """
    if not (message.worker_id and message.incarnation and message.address):
        raise ConnectionError("another router tells of a worker without an id, an incarnation or an address")
    return Register(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        address=message.address,
        forwarded=True,
    )


def encode_members(members: Sequence[Registration]) -> Iterable[pb.ReplicaMessage]:
    """Yield messages that together contain all members, with at most `MEMBERS_A_MESSAGE` in each message."""
    for first in range(0, len(members), MEMBERS_A_MESSAGE):
        batch = [
            pb.ReplicaMember(registered=encode_registered(each), lease_ms=each.lease // MILLISECOND)
            for each in members[first : first + MEMBERS_A_MESSAGE]
        ]
        yield pb.ReplicaMessage(members=pb.ReplicaMembers(members=batch))


def decode_member(message: pb.ReplicaMember) -> Registration:
    """Decode a worker's registration, with the remaining time of the lease that another router gave the worker.

    Raises:
        ConnectionError: The message is no valid registration.
    """
    registered = decode_registered(message.registered)
    return Registration(
        worker_id=registered.worker_id,
        incarnation=registered.incarnation,
        address=registered.address,
        lease=Nanos(message.lease_ms * MILLISECOND),
    )


def encode_bookings(booked: Mapping[WorkerId, ReservationTotals]) -> pb.ReplicaMessage:
    workers = [
        pb.WorkerBookings(
            worker_id=worker_id, requests=each.requests, prefill_tokens=each.prefill_tokens, blocks=each.blocks
        )
        for worker_id, each in booked.items()
    ]
    return pb.ReplicaMessage(bookings=pb.ReplicaBookings(workers=workers))


def encode_sessions(bindings: Sequence[SessionBinding]) -> Iterable[pb.ReplicaMessage]:
    """Yield messages that together contain all session bindings, with at most `BINDINGS_A_MESSAGE` in each message."""
    for first in range(0, len(bindings), BINDINGS_A_MESSAGE):
        batch = [
            pb.SessionBinding(
                tenant=each.key[0],
                session=each.key[1],
                worker_id=each.worker_id or "",
                stamp=min(each.stamp, LATEST),  # peers close the connection at a later time (`decode_instant`)
            )
            for each in bindings[first : first + BINDINGS_A_MESSAGE]
        ]
        yield pb.ReplicaMessage(sessions=pb.ReplicaSessions(bindings=batch))


def encode_prompts(placed: Sequence[PlacedPrompt], over: Sequence[int], private: int) -> Iterable[pb.ReplicaMessage]:
    """Yield messages that together contain all prompts.

    Args:
        placed: Prompts that workers are about to compute, or are assumed to have cached.
        over: Numbers of prompts that were sent earlier and that no worker computes any more; they go into the first message.
        private: Fingerprint of the secret from which block keys are made; 0: there is no common secret.
    """
    for first in range(0, max(len(placed), bool(over)), PROMPTS_A_MESSAGE):
        batch = [
            pb.PlacedPrompt(
                worker_id=each.worker_id,
                number=each.number,
                keys=pack(f"<{len(each.keys)}Q", *each.keys),
                age_ms=min(each.age_ms, MOST_AGE_MS),
            )
            for each in placed[first : first + PROMPTS_A_MESSAGE]
        ]
        over = () if first else over
        yield pb.ReplicaMessage(prompts=pb.ReplicaPrompts(placed=batch, over=over, private=private))


def decode_placed(message: pb.PlacedPrompt) -> PlacedPrompt:
    """Decode a prompt that another router has placed.

    Raises:
        ConnectionError: The prompt has no keys, too many keys, or an incomplete key.
    """
    count, odd = divmod(len(message.keys), KEY_BYTES)
    if odd or not 0 < count <= MAX_ANNOUNCED_KEYS:
        raise ConnectionError(f"another router tells {len(message.keys)} bytes of keys of a prompt")
    keys = unpack(f"<{count}Q", message.keys)
    return PlacedPrompt(worker_id=WorkerId(message.worker_id), number=message.number, keys=keys, age_ms=message.age_ms)


def decode_binding(message: pb.SessionBinding) -> SessionBinding:
    worker_id = WorkerId(message.worker_id) if message.worker_id else None
    return SessionBinding(
        key=(message.tenant, message.session), worker_id=worker_id, stamp=decode_instant(message.stamp)
    )


def encode_taken(taken: Mapping[str, TenantUsageDelta]) -> pb.ReplicaMessage:
    return pb.ReplicaMessage(taken=pb.ReplicaTaken(tenants=_amounts(taken)))


def encode_left(left: Mapping[str, BucketLevels]) -> pb.ReplicaMessage:
    return pb.ReplicaMessage(left=pb.ReplicaLeft(tenants=_amounts(left)))


def decode_taken(message: pb.ReplicaTaken) -> dict[str, TenantUsageDelta]:
    """Decode the usage of tenants at another router, by tenant.

    Raises:
        ConnectionError: An amount is negative, above `MOST_TAKEN`, or no number. Such an amount could make a token bucket
            unusable for ever.
    """
    return {
        each.tenant: TenantUsageDelta(requests=_amount(each.requests), tokens=_amount(each.tokens))
        for each in message.tenants
    }


def decode_left(message: pb.ReplicaLeft) -> dict[str, BucketLevels]:
    """Decode what is left of the tenants' limits as another router counts it, by tenant.

    Raises:
        ConnectionError: An amount is no number, or its absolute value is above `MOST_TAKEN`.
    """
    return {
        each.tenant: BucketLevels(
            requests=_amount(each.requests, -MOST_TAKEN), tokens=_amount(each.tokens, -MOST_TAKEN)
        )
        for each in message.tenants
    }


def _amounts(amounts: Mapping[str, TenantUsageDelta | BucketLevels]) -> list[pb.TenantAmount]:
    return [pb.TenantAmount(tenant=name, requests=each.requests, tokens=each.tokens) for name, each in amounts.items()]


def _amount(amount: float, least: float = 0.0) -> float:
    if not least <= amount <= MOST_TAKEN:
        raise ConnectionError(f"another router tells that a tenant took {amount}")
    return amount


def decode_instant(instant: int) -> int:
    """Decode a time that another router sent, in nanoseconds of Unix time.

    Raises:
        ConnectionError: The time is after `LATEST`. A router that accepted such a time would advance its clock for
            session bindings to it, and give all its later bindings still later stamps.
    """
    if instant > LATEST:
        raise ConnectionError(f"another router's clock says {instant} ns")
    return instant


def decode_thresholds(message: pb.ReplicaTuned) -> PeerThresholds:
    """Decode the thresholds that were changed at another router.

    Raises:
        ConnectionError: The thresholds are invalid.
    """
    values = {name: getattr(message.thresholds, name) for name in Thresholds.__struct_fields__}
    try:
        return PeerThresholds(parse_thresholds(values), message.at_unix_ms)
    except RequestRejected as refused:
        raise ConnectionError(f"another router has set {refused.message}") from refused


def decode_booked(message: pb.ReplicaBookings) -> dict[WorkerId, ReservationTotals]:
    """Decode the reservations of another router, by worker.

    Raises:
        ConnectionError: A number of blocks is negative, not finite, or larger than `MOST_BLOCKS`.
    """
    booked = {}
    for each in message.workers:
        if not 0 <= each.blocks <= MOST_BLOCKS:
            raise ConnectionError(f"another router has booked {each.blocks} blocks on {each.worker_id[:100]!r}")
        booked[WorkerId(each.worker_id)] = ReservationTotals(each.prefill_tokens, each.blocks, each.requests)
    return booked
