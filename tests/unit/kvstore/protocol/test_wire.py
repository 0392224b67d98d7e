import msgspec
import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.errors import InvalidArgument, LayoutMismatch
from kvstore.messages import (
    BlockChanges,
    LeasedSlots,
    LeaseId,
    Match,
    ReservationId,
    ReservedSlot,
    SessionPinResult,
    Slot,
    Slots,
    Stats,
    TenantStats,
    TierStatus,
    WriteReservation,
)
from kvstore.namespace import KvNamespace
from kvstore.protocol import wire
from kvstore.v1 import blocks_pb2 as pb
from tests.support.kvstore.builders import a_chain, a_namespace


def a_hello(**fields) -> pb.HelloRequest:
    """Return the handshake message of a namespace in which `fields` may be invalid."""
    namespace = a_namespace()
    message = wire.namespace_message(namespace)
    for field, value in fields.items():
        setattr(message, field, value)
    return pb.HelloRequest(namespace=message, digest=namespace.digest)


def test_namespace_survives_a_round_trip():
    namespace = a_namespace(lora="adapter@3", layout="NHD")

    assert (
        wire.parse_hello(pb.HelloRequest(namespace=wire.namespace_message(namespace), digest=namespace.digest))
        == namespace
    )


def test_every_field_of_a_namespace_is_on_the_wire():
    assert set(KvNamespace.__struct_fields__) == {field.name for field in pb.Namespace.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "m" * 513),
        ("dtype", ""),
        ("layout", ""),
        ("block_tokens", 0),
        ("layers", 0),
        ("kv_heads", 0),
        ("head_dim", 0),
        ("block_bytes", 0),
        ("block_bytes", 1 << 32),
        ("hash_algorithm", "md5"),
        ("hash_algorithm", ""),
    ],
)
def test_an_impossible_namespace_is_refused_by_field(field, value):
    with pytest.raises(InvalidArgument) as refused:
        wire.parse_hello(a_hello(**{field: value}))

    assert refused.value.field == f"namespace.{field}"


@pytest.mark.parametrize(("field", "change"), [("format_version", {"format_version": 2}), ("digest", {"layers": 5})])
def test_other_version_or_digest_is_a_layout_mismatch(field, change):
    with pytest.raises(LayoutMismatch) as refused:
        wire.parse_hello(a_hello(**change))

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "parse"),
    [
        ("hashes", lambda: wire.parse_hashes(b"")),
        ("hashes", lambda: wire.parse_hashes(b"x" * 17)),
        ("hashes", lambda: wire.parse_hashes(b"x" * 16 * (wire.MAX_HASHES + 1))),
        ("lease_ms", lambda: wire.parse_lease(0, 1, Nanos(30 * SECOND))),
        ("lease_ms", lambda: wire.parse_lease(30_001, 0, Nanos(30 * SECOND))),
        ("digest", lambda: wire.parse_digest(b"short")),
        ("indices", lambda: wire.parse_checksums(pb.PublishRequest(indices=[1, 1], crc32c=[1, 2]))),
        ("crc32c", lambda: wire.parse_checksums(pb.PublishRequest(indices=[1, 2], crc32c=[1]))),
        ("generations", lambda: wire.parse_condemned(pb.CondemnRequest(hashes=b"x" * 32, generations=[1]))),
    ],
)
def test_invalid_request_is_refused_by_field(field, parse):
    with pytest.raises(InvalidArgument) as refused:
        parse()

    assert refused.value.field == field


def test_match_and_reservation_survive_a_round_trip():
    slots = (Slot(4096, (7 << 32) + 1, 0xFFFFFFFF), Slot(0, (7 << 32) + 2, 0))
    leased = LeasedSlots(lease_id=LeaseId((1 << 62) + 1), slots=Slots.of(slots))
    reservation = WriteReservation(reservation_id=ReservationId(9), reserved=(ReservedSlot(3, slots[0]),), refused=2)

    match = wire.parse_match(wire.match_message(leased), "i", a_chain(3))

    assert (match.lease_id, tuple(match.slots), match.names, match.incarnation) == (
        leased.lease_id,
        slots,
        tuple(a_chain(2)),
        "i",
    )
    places = wire.parse_reservation(wire.reservation_message(reservation))

    assert (places.reservation_id, places.refused) == (reservation.reservation_id, reservation.refused)
    assert tuple(map(ReservedSlot, places.indices, places.slots)) == reservation.reserved


def test_a_match_travels_between_processes_as_msgpack():
    match = Match(incarnation="i", lease_id=LeaseId(5), names=tuple(a_chain(1)), slots=Slots.of([Slot(1, 2, 3)]))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(match), type=Match) == match


def test_session_pin_survives_a_round_trip():
    held = SessionPinResult(blocks=7, refused=2)

    assert wire.parse_hold(wire.hold_message(held)) == held


def test_statistics_survive_a_round_trip():
    tiers = tuple(counted(TierStatus, name=name) for name in ("ssd", "redis"))
    tenants = (counted(TenantStats, tenant="0123456789abcdef"),)
    stats = counted(Stats, tiers=tiers, tenants=tenants)

    assert wire.parse_stats(wire.stats_message(stats, "store")) == stats


def test_every_field_of_the_statistics_is_on_the_wire():
    for message, value, more in (
        (pb.StatsResponse, Stats, {"store_id", "protocols"}),
        (pb.TierStats, TierStatus, set()),
        (pb.TenantStats, TenantStats, set()),
    ):
        assert {field.name for field in message.DESCRIPTOR.fields} == {*value.__struct_fields__, *more}


def test_changes_say_in_which_tier():
    message = wire.changes_message(3, BlockChanges(digest=b"d" * 16, stored=tuple(a_chain(2)), tier="ssd"))

    assert (message.sequence, message.tier, message.stored) == (3, "ssd", b"".join(a_chain(2)))
    assert wire.changes_message(1, BlockChanges(digest=b"d" * 16)).tier == "cpu"


def test_slots_are_twenty_bytes_little_endian():
    """Compare packed slots with fixed bytes, because `blocks.proto` promises this form to clients in other languages."""
    slots = Slots.of([Slot(4096, 7, 0x01020304), Slot(1 << 40, (1 << 63) + 1)])

    assert slots.packed.hex() == ("00100000000000000700000000000000040302010000000000010000010000000000008000000000")
    assert (len(slots), slots[1], list(slots)) == (2, Slot(1 << 40, (1 << 63) + 1), [slots[0], slots[1]])
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            slots[outside]
    assert not Slots()


def test_incomplete_slot_is_dropped():
    assert len(wire.parse_match(pb.MatchResponse(lease_id=1, slots=b"x" * 41), "i", a_chain(3))) == 2


def counted(kind, **fields):
    """Return a record whose fields all have different values, so that a test notices if two fields are exchanged."""
    numbers = {name: 100 + index for index, name in enumerate(kind.__struct_fields__)}
    return kind(**{**numbers, **fields})
