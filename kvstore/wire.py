"""Between `kvstore.v1` messages and the values of this package; checks what comes in, field by field."""

from collections.abc import Sequence

import grpc

from kvstore.block import HASH_BYTES, ChainHash, HashAlgorithm, split
from kvstore.clock import MILLISECOND, Nanos
from kvstore.errors import (
    Exhausted,
    InvalidArgument,
    LayoutMismatch,
    NamespaceInUse,
    NamespaceUnknown,
    Restarted,
    StoreError,
)
from kvstore.layout import FORMAT_VERSION, Namespace
from kvstore.messages import BlockChanges, Leased, LeaseId, Match, Reservation, ReservationId, Reserved, Slot, Stats
from kvstore.v1 import blocks_pb2 as pb

DIGEST_BYTES = 16
MAX_HASHES = 65_536
"""In one request: 1 MiB of names, 2 million tokens at 32 a block."""

MAX_TEXT = 512  # characters of a name
MAX_MESSAGE_BYTES = 16 << 20
"""Of a gRPC message: 65,536 slots take 2 MiB, and a dump is cut into pieces."""

FIELD_KEY = "kvstore-field"
"""Trailing metadata that names the offending field."""

_CODES: dict[type[StoreError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    NamespaceInUse: grpc.StatusCode.FAILED_PRECONDITION,
    NamespaceUnknown: grpc.StatusCode.FAILED_PRECONDITION,
    Restarted: grpc.StatusCode.FAILED_PRECONDITION,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(error: StoreError) -> tuple[grpc.StatusCode, str]:
    """The gRPC code, and the offending field or an empty string."""
    field = error.fields[0] if isinstance(error, NamespaceInUse) else getattr(error, "field", "")
    return _CODES[type(error)], field


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(**{name: getattr(namespace, name) for name in namespace.__struct_fields__})


def parse_hello(request: pb.HelloRequest) -> Namespace:
    """The namespace that a client means.

    Raises:
        InvalidArgument: A field is out of range.
        LayoutMismatch: Client and node are of versions that do not understand each other.
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
    namespace = Namespace(
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
    """A namespace digest.

    Raises:
        InvalidArgument: It has not 16 bytes.
    """
    if len(digest) != DIGEST_BYTES:
        raise InvalidArgument("digest", f"{len(digest)} bytes instead of {DIGEST_BYTES}")
    return digest


def parse_hashes(hashes: bytes) -> list[ChainHash]:
    """Block names.

    Raises:
        InvalidArgument: None, too many, or a torn one.
    """
    if not hashes:
        raise InvalidArgument("hashes", "must not be empty")
    if len(hashes) > MAX_HASHES * HASH_BYTES:
        raise InvalidArgument("hashes", f"more than {MAX_HASHES} at a time")
    try:
        return split(hashes)
    except ValueError as error:
        raise InvalidArgument("hashes", f"{len(hashes)} bytes is not a multiple of {HASH_BYTES}") from error


def parse_lease(lease_ms: int, least_ms: int, limit: Nanos) -> Nanos:
    """How long to hold.

    Raises:
        InvalidArgument: Longer than the node allows, or too short.
    """
    limit_ms = limit // MILLISECOND
    if not least_ms <= lease_ms <= limit_ms:
        raise InvalidArgument("lease_ms", f"{lease_ms} is not within {least_ms}..{limit_ms}")
    return Nanos(lease_ms * MILLISECOND)


def parse_checksums(request: pb.PublishRequest) -> dict[int, int]:
    """CRC-32C by index.

    Raises:
        InvalidArgument: An index twice.
    """
    checksums = {published.index: published.crc32c for published in request.published}
    if len(checksums) != len(request.published):
        raise InvalidArgument("published", "an index is there twice")
    return checksums


def parse_condemned(request: pb.CondemnRequest) -> list[tuple[ChainHash, int]]:
    """Names and generations.

    Raises:
        InvalidArgument: Not as many of the one as of the other.
    """
    names = parse_hashes(request.hashes)
    if len(names) != len(request.generations):
        raise InvalidArgument("generations", f"{len(request.generations)} for {len(names)} hashes")
    return list(zip(names, request.generations, strict=True))


def slot_message(slot: Slot) -> pb.Slot:
    return pb.Slot(offset=slot.offset, crc32c=slot.crc32c, generation=slot.generation)


def match_message(leased: Leased) -> pb.MatchResponse:
    return pb.MatchResponse(lease_id=leased.lease_id, slots=[slot_message(slot) for slot in leased.slots])


def parse_match(response: pb.MatchResponse, incarnation: str, names: Sequence[ChainHash]) -> Match:
    slots = tuple(_slot(slot) for slot in response.slots)
    return Match(
        incarnation=incarnation, lease_id=LeaseId(response.lease_id), names=tuple(names[: len(slots)]), slots=slots
    )


def reservation_message(reservation: Reservation) -> pb.ReserveResponse:
    return pb.ReserveResponse(
        reservation_id=reservation.reservation_id,
        reserved=[
            pb.Reserved(index=reserved.index, slot=slot_message(reserved.slot)) for reserved in reservation.reserved
        ],
        refused=reservation.refused,
    )


def parse_reservation(response: pb.ReserveResponse) -> Reservation:
    return Reservation(
        reservation_id=ReservationId(response.reservation_id),
        reserved=tuple(Reserved(reserved.index, _slot(reserved.slot)) for reserved in response.reserved),
        refused=response.refused,
    )


def changes_message(sequence: int, changes: BlockChanges) -> pb.BlockChanges:
    return pb.BlockChanges(
        sequence=sequence, digest=changes.digest, stored=b"".join(changes.stored), removed=b"".join(changes.removed)
    )


def stats_message(stats: Stats, store_id: str) -> pb.StatsResponse:
    return pb.StatsResponse(store_id=store_id, **{name: getattr(stats, name) for name in stats.__struct_fields__})


def parse_stats(response: pb.StatsResponse) -> Stats:
    return Stats(**{name: getattr(response, name) for name in Stats.__struct_fields__})


def _slot(slot: pb.Slot) -> Slot:
    return Slot(slot.offset, slot.generation, slot.crc32c)
