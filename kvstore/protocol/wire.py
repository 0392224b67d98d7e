"""Wire conversion: converts `kvstore.v1` messages to the values of this package, and back.

The fields of a client's request are checked. The answers of a node are not checked; an incomplete slot in an answer is
dropped.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import Message
from msgspec import Struct

from kvstore.block import HASH_BYTES, SALT_BYTES, BlockHash, HashAlgorithm, split
from kvstore.clock import MILLISECOND, Nanos
from kvstore.errors import (
    Exhausted,
    IncompatibleVersion,
    InvalidArgument,
    LayoutMismatch,
    NamespaceInUse,
    NamespaceUnknown,
    Restarted,
    StoreError,
)
from kvstore.messages import (
    NODE,
    SLOT,
    BlockChanges,
    ClientWriteReservation,
    EvacuationResult,
    LeasedSlots,
    LeaseId,
    Match,
    ReservationId,
    SessionPinResult,
    Slots,
    Stats,
    TenantStats,
    TierStatus,
    WriteReservation,
)
from kvstore.namespace import DIGEST_BYTES, FORMAT_VERSION, KvNamespace
from kvstore.protocol.range_messages import RangeCarrier, parse_range
from kvstore.protocol.versions import NoCommonProtocol, agree, own_protocols
from kvstore.transports.nixl import NixlOffer
from kvstore.v1 import blocks_pb2 as pb

MAX_HASHES = 65_536
"""Maximum number of block hashes in one request. They take 1 MiB, and cover 2 million tokens at 32 tokens per block."""

NOTHING_PROMOTED: Mapping[str, int] = MappingProxyType({})

MAX_LEASES = 1024
"""Maximum number of leases that one request releases. Each lease may have many blocks, and other clients wait while
they are released."""

MAX_EVACUATED = 4096
"""Maximum number of blocks that one request evacuates; all of them are looked up at once, while other clients wait."""

MAX_TEXT = 512  # maximum number of characters of a text field in a client's request
MAX_WAIT_MS = 60_000
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum length of a gRPC message: 65,536 slots take 1.3 MiB, and a cache dump is divided into several messages."""

FIELD_KEY = "kvstore-field"
"""Key in the trailing metadata of a refused call; its value is the name of the offending field."""

_CODES: dict[type[StoreError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    NamespaceInUse: grpc.StatusCode.FAILED_PRECONDITION,
    NamespaceUnknown: grpc.StatusCode.FAILED_PRECONDITION,
    Restarted: grpc.StatusCode.FAILED_PRECONDITION,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Clients of protocol version 1 understand this code as a node that cannot be reached now, and try again later.
    IncompatibleVersion: grpc.StatusCode.OUT_OF_RANGE,
}


def status_of(error: StoreError) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC code of an error, and the offending field or an empty string."""
    field = error.fields[0] if isinstance(error, NamespaceInUse) else getattr(error, "field", "")
    return _CODES[type(error)], field


def namespace_message(namespace: KvNamespace) -> pb.Namespace:
    return pb.Namespace(**{name: getattr(namespace, name) for name in namespace.__struct_fields__})


def agree_with_client(store_id: str, request: RangeCarrier) -> int:
    """Return the protocol version to use with a client; raise IncompatibleVersion if there is none."""
    try:
        return agree(own_protocols(), parse_range(request), own_name=f"store node {store_id}", peer_name="the client")
    except NoCommonProtocol as error:
        raise IncompatibleVersion(str(error)) from error


def agree_with_node(address: str, answer: RangeCarrier) -> int:
    """Return the protocol version to use with a node; raise IncompatibleVersion if there is none."""
    try:
        return agree(own_protocols(), parse_range(answer), own_name="this client", peer_name=f"store node {address}")
    except NoCommonProtocol as error:
        raise IncompatibleVersion(str(error)) from error


def parse_hello(request: pb.HelloRequest) -> KvNamespace:
    """Return the namespace of a client.

    Raise InvalidArgument if a field has an invalid value, and LayoutMismatch if the format versions of client and node
    differ, or if the digest does not follow from the fields.
    """
    message = request.namespace
    for field in ("model", "revision", "dtype", "layout", "lora"):
        text = getattr(message, field)
        if len(text) > MAX_TEXT:
            raise InvalidArgument(f"namespace.{field}", f"{len(text)} characters are more than {MAX_TEXT}")
        if not text and field not in ("revision", "lora"):
            raise InvalidArgument(f"namespace.{field}", "must not be empty")
    for field in ("block_tokens", "layers", "kv_heads", "head_dim", "block_bytes"):
        if getattr(message, field) < 1:
            raise InvalidArgument(f"namespace.{field}", "must be at least 1")
    if message.block_bytes >= 1 << 32:
        raise InvalidArgument("namespace.block_bytes", f"{message.block_bytes} is 4 GiB or more")
    if message.format_version != FORMAT_VERSION:
        raise LayoutMismatch(
            "format_version", f"format_version: {FORMAT_VERSION} here, {message.format_version} offered"
        )
    if message.hash_algorithm not in tuple(HashAlgorithm):
        raise InvalidArgument(
            "namespace.hash_algorithm", f"{message.hash_algorithm!r} is not one of {', '.join(HashAlgorithm)}"
        )
    namespace = KvNamespace(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        layout=message.layout,
        lora=message.lora,
        hash_algorithm=HashAlgorithm(message.hash_algorithm),
        block_bytes=message.block_bytes,
        format_version=message.format_version,
    )
    if request.digest != namespace.digest:
        raise LayoutMismatch(
            "digest", f"digest: {request.digest.hex()} does not follow from the namespace ({namespace.fingerprint})"
        )
    return namespace


def parse_digest(digest: bytes) -> bytes:
    """Return a namespace digest; raise InvalidArgument unless it has 16 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidArgument("digest", f"{len(digest)} bytes instead of {DIGEST_BYTES}")
    return digest


def check_hashes(hashes: bytes) -> bytes:
    """Return concatenated block hashes unchanged; raise InvalidArgument if there are none, too many, or incomplete ones."""
    if not hashes:
        raise InvalidArgument("hashes", "must not be empty")
    if len(hashes) > MAX_HASHES * HASH_BYTES:
        raise InvalidArgument("hashes", f"more than {MAX_HASHES} at a time")
    if len(hashes) % HASH_BYTES:
        raise InvalidArgument("hashes", f"{len(hashes)} bytes is not a multiple of {HASH_BYTES}")
    return hashes


def parse_hashes(hashes: bytes) -> list[BlockHash]:
    """Return block hashes, checked as by `check_hashes`."""
    return split(check_hashes(hashes))


def parse_lease(lease_ms: int, least_ms: int, limit: Nanos, field: str = "lease_ms") -> Nanos:
    """Return the duration of a lease; raise InvalidArgument if it is below `least_ms`, or above `limit`."""
    limit_ms = limit // MILLISECOND
    if not least_ms <= lease_ms <= limit_ms:
        raise InvalidArgument(field, f"{lease_ms} is not within {least_ms}..{limit_ms}")
    return Nanos(lease_ms * MILLISECOND)


def parse_leases(lease_ids: Sequence[int]) -> list[LeaseId]:
    """Return the leases to release; raise InvalidArgument if there are too many."""
    if len(lease_ids) > MAX_LEASES:
        raise InvalidArgument("lease_ids", f"{len(lease_ids)} are more than {MAX_LEASES} at a time")
    return [LeaseId(lease_id) for lease_id in lease_ids]


def parse_max_wait(patience_ms: int) -> Nanos:
    """Return the max wait of a request, limited to `MAX_WAIT_MS`, which is longer than any useful promotion."""
    return Nanos(min(patience_ms, MAX_WAIT_MS) * MILLISECOND)


def parse_tenant(tenant: bytes) -> bytes:
    """Return the salt of a tenant's chains, which may be empty; raise InvalidArgument unless it has 0 or 32 bytes."""
    if len(tenant) not in (0, SALT_BYTES):
        raise InvalidArgument("tenant", f"{len(tenant)} bytes instead of 0 or {SALT_BYTES}")
    return tenant


def parse_owner(owner: str) -> str:
    """Return the owner of a reservation; raise InvalidArgument if it is too long, or is `NODE`, the name of the node's own reservations."""
    if len(owner) > MAX_TEXT or owner == NODE:
        raise InvalidArgument("owner", f"must have at most {MAX_TEXT} characters and not be {NODE!r}")
    return owner


def parse_session(session: str) -> str:
    """Return the session of a pin; raise InvalidArgument if it is empty or too long."""
    if not 0 < len(session) <= MAX_TEXT:
        raise InvalidArgument("session", f"must have 1 to {MAX_TEXT} characters, not {len(session)}")
    return session


def parse_checksums(request: pb.PublishRequest) -> dict[int, int]:
    """Return the CRC-32C of each written block, by the index of the block in the reserved chain.

    Raise InvalidArgument unless each index occurs once and has a checksum.
    """
    if len(request.crc32c) != len(request.indices):
        raise InvalidArgument("crc32c", f"{len(request.crc32c)} for {len(request.indices)} indices")
    checksums = dict(zip(request.indices, request.crc32c, strict=True))
    if len(checksums) != len(request.indices):
        raise InvalidArgument("indices", "an index is there twice")
    return checksums


def parse_condemned(request: pb.CondemnRequest) -> list[tuple[BlockHash, int]]:
    """Return the hashes and slot generations of damaged blocks; raise InvalidArgument if the numbers differ or the hashes are invalid."""
    names = parse_hashes(request.hashes)
    if len(names) != len(request.generations):
        raise InvalidArgument("generations", f"{len(request.generations)} for {len(names)} hashes")
    return list(zip(names, request.generations, strict=True))


def match_message(
    leased: LeasedSlots, loading: int = 0, risen: Mapping[str, int] = NOTHING_PROMOTED
) -> pb.MatchResponse:
    response = pb.MatchResponse(lease_id=leased.lease_id, slots=leased.slots.packed, loading=loading)
    for tier, blocks in risen.items():
        response.risen.add(tier=tier, blocks=blocks)
    return response


def parse_match(response: pb.MatchResponse, incarnation: str, names: Sequence[BlockHash]) -> Match:
    slots = Slots(_complete_slots(response.slots))
    return Match(
        incarnation=incarnation,
        lease_id=LeaseId(response.lease_id),
        names=tuple(names[: len(slots)]),
        slots=slots,
        loading=response.loading,
        promoted={risen.tier: risen.blocks for risen in response.risen},
    )


def reservation_message(reservation: WriteReservation) -> pb.ReserveResponse:
    return pb.ReserveResponse(
        reservation_id=reservation.reservation_id,
        indices=[reserved.index for reserved in reservation.reserved],
        slots=Slots.of(reserved.slot for reserved in reservation.reserved).packed,
        refused=reservation.refused,
    )


def parse_reservation(response: pb.ReserveResponse) -> ClientWriteReservation:
    slots = Slots(_complete_slots(response.slots))
    indices = tuple(response.indices)
    count = min(len(indices), len(slots))
    return ClientWriteReservation(
        reservation_id=ReservationId(response.reservation_id),
        indices=indices[:count],
        slots=slots[:count],
        refused=response.refused,
    )


def hold_message(held: SessionPinResult) -> pb.HoldResponse:
    return pb.HoldResponse(held=held.blocks, refused=held.refused)


def parse_hold(response: pb.HoldResponse) -> SessionPinResult:
    return SessionPinResult(blocks=response.held, refused=response.refused)


def parse_evacuated(hashes: bytes) -> list[BlockHash]:
    """Return the blocks to evacuate; raise InvalidArgument if there are none, too many, or an incomplete hash."""
    if len(hashes) > MAX_EVACUATED * HASH_BYTES:
        raise InvalidArgument("hashes", f"more than {MAX_EVACUATED} at a time")
    return parse_hashes(hashes)


def evacuation_message(evacuated: EvacuationResult) -> pb.EvacuateResponse:
    return pb.EvacuateResponse(**_fields(evacuated))


def parse_evacuation(response: pb.EvacuateResponse) -> EvacuationResult:
    return EvacuationResult(**_named(response, EvacuationResult))


def changes_message(sequence: int, changes: BlockChanges) -> pb.BlockChanges:
    return pb.BlockChanges(
        sequence=sequence,
        digest=changes.digest,
        stored=b"".join(changes.stored),
        removed=b"".join(changes.removed),
        tier=changes.tier,
    )


def nixl_message(offer: NixlOffer | None) -> pb.NixlOffer | None:
    return None if offer is None else pb.NixlOffer(metadata=offer.metadata, blocks=offer.blocks, stamps=offer.stamps)


def parse_nixl(hello: pb.HelloResponse) -> NixlOffer | None:
    """Return the node's NIXL offer; None if the node has no NIXL agent."""
    message = hello.nixl
    return NixlOffer(message.metadata, message.blocks, message.stamps) if hello.HasField("nixl") else None


def stats_message(stats: Stats, store_id: str) -> pb.StatsResponse:
    return pb.StatsResponse(
        store_id=store_id,
        tiers=[pb.TierStats(**_fields(tier)) for tier in stats.tiers],
        tenants=[pb.TenantStats(**_fields(tenant)) for tenant in stats.tenants],
        **{name: value for name, value in _fields(stats).items() if name not in _ROWS},
    )


def parse_stats(response: pb.StatsResponse) -> Stats:
    return Stats(
        tiers=tuple(TierStatus(**_named(row, TierStatus)) for row in response.tiers),
        tenants=tuple(TenantStats(**_named(row, TenantStats)) for row in response.tenants),
        **{name: value for name, value in _named(response, Stats).items() if name not in _ROWS},
    )


_ROWS = ("tiers", "tenants")


def _fields(value: Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _named(message: Message, kind: type[Struct]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in kind.__struct_fields__}


def _complete_slots(slots: bytes) -> bytes:
    """Return the bytes of the complete slots, without an incomplete slot at the end.

    Only a node of another version sends an incomplete slot, and no block can be read from such a node.
    """
    return slots[: len(slots) - len(slots) % SLOT.size]
