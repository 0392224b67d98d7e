"""Reader of recordings: every router event is written and read again unchanged, except for its content."""

from typing import get_args

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.requests import Finish, KvOrigin, KvPhase, KvReport, Source
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Handoff, KvCleared, KvRemoved, KvStored, LoraAdapter, Progress, Rejected
from fleet.recording.format import (
    FORMAT,
    RecordingHead,
    deciding_settings,
    end_line,
    entry_line,
    head_line,
    record_command,
)
from fleet.recording.reader import Recording
from fleet.router.kv_index.peer_prompts import PlacedPrompt
from fleet.router.kv_index.prefix_index import Knowledge
from fleet.router.messages import (
    Arrived,
    AttemptRejected,
    CacheAged,
    CacheAssumed,
    CacheDriftChanged,
    CacheReported,
    CancelAttempt,
    Complete,
    Dispatch,
    Emit,
    KvChanged,
    KvPathsChanged,
    LoadReported,
    PeerLeft,
    PeerPlaced,
    PeerReserved,
    Reject,
    RequestCancelled,
    ReservationTotals,
    RouterEvent,
    RouterTicked,
    SessionsBound,
    StartedOver,
    StoreChanged,
    ThresholdsChanged,
    Undelivered,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
    WorkerStepped,
)
from fleet.router.sessions import SessionBinding
from fleet.router.settings.router import RouterSettings, Thresholds
from tests.support.builders import a_description, a_load, a_start, an_arrival

NOW = Nanos(7 * SECOND + 1)
HASH = bytes(range(16))
HANDOFF = Handoff(kv_path=KvPath.DIRECT, prefill_worker="p", fingerprint="f", num_tokens=9, params=b"")
REPORT = KvReport(prompt_blocks=1, origins=(KvOrigin(source=Source.ENGINE, blocks=1),), cached_tokens=32)
EVENTS = (
    WorkerJoined(description=a_description(), address="a", knowledge=Knowledge.APPROXIMATE, believed_for=Nanos(5)),
    WorkerLeft(worker_id="w"),
    WorkerDraining(worker_id="w"),
    KvPathsChanged(worker_id="w", kv_paths=(KvPath.STORE,), store_id="s"),
    LoadReported(worker_id="w", load=a_load(running=3)),
    WorkerResumed(worker_id="w"),
    KvChanged(worker_id="w", events=(KvCleared(), KvStored((HASH,)), KvRemoved((HASH, HASH)))),
    CacheAssumed(worker_id="w", stored=[1, (1 << 64) - 1], removed=[3]),
    CacheAged(worker_id="w"),
    CacheReported(worker_id="w", request_id="r#1", prompt_tokens=9, cached_tokens=8),
    StoreChanged(store_id="s", fingerprint="f", stored=(HASH,), removed=(HASH,), reset=True),
    WorkerStepped(
        worker_id="w",
        progress=(
            Progress(request_id="r#1", token_ids=(0, 0), kv=REPORT),
            Progress(request_id="r#2", finish=Finish.STOP, handoff=HANDOFF),
        ),
    ),
    AttemptRejected(
        worker_id="w", rejected=Rejected(request_id="r#1", reason=Reason.KV_MISMATCH, message="", field="x")
    ),
    PeerReserved(replica="o", booked={"w": ReservationTotals(5, 2.5, 1)}),
    PeerPlaced(replica="o", placed=(PlacedPrompt(worker_id="w", number=3, keys=(1, (1 << 64) - 1)),), over=(1, 2)),
    PeerLeft(replica="o"),
    SessionsBound(
        bindings=(
            SessionBinding(key=("t", "s"), worker_id="w", stamp=7),
            SessionBinding(key=("", "s"), worker_id=None),
        ),
        clock=8,
    ),
    an_arrival(
        tokens=b"",
        deadline=NOW,
        session="s",
        tenant="t",
        labels=("l",),
        adapter=LoraAdapter("a", "1"),
        keys={32: (1, 2), 64: ((1 << 64) - 1,)},
        kv_path=KvPath.STORE,
        pin="w",
        among=("w", "v"),
    ),
    RequestCancelled(request_id="r"),
    Undelivered(request_id="r#1", worker_id="w"),
    RouterTicked(),
    ThresholdsChanged(thresholds=Thresholds(max_queued=3)),
)
COMMANDS = (
    Dispatch(worker_id="w", start=a_start(phase=Phase.DECODE, handoff=HANDOFF)),
    CancelAttempt(worker_id="w", request_id="r#1"),
    Emit(request_id="r", progress=Progress(request_id="r", token_ids=(5, 6)), cached_tokens=3),
    Complete(
        request_id="r",
        finish=Finish.LENGTH,
        kv=(KvPhase(phase=Phase.DECODE, worker_id="w", report=REPORT),),
        cached_tokens=32,
    ),
    StartedOver(request_id="r"),
    Reject(request_id="r", reason=Reason.QUEUE_FULL, message="text", field="f", retry_after_ms=7),
    CacheDriftChanged(worker_id="w", knowledge=Knowledge.EXACT, drifting=True, precision=0.1, recall=1 / 3),
)


def read_back(tmp_path, *lines):
    path = tmp_path / "flight"
    head = RecordingHead(recording=FORMAT, fleet="0", began=NOW, began_unix=1, seed=1, settings=RouterSettings())
    path.write_bytes(b"".join([head_line(head), *lines, end_line("it is a test")]))
    return list(Recording(path).entries())


def test_all_events_are_covered():
    assert {type(event) for event in EVENTS} == set(get_args(RouterEvent))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_survives_the_round_trip(tmp_path, event):
    keys = ((), (1, (1 << 64) - 1))
    (entry,) = read_back(tmp_path, entry_line(NOW, event, keys, COMMANDS))
    assert (entry.line, entry.now, entry.event, tuple(entry.keys)) == (2, NOW, event, keys)
    assert entry.commands == [record_command(command) for command in COMMANDS]


def test_dictionary_views_are_written_as_lists(tmp_path):
    event = CacheAssumed(worker_id="w", stored={1: 0, 2: 0}.keys(), removed={3})
    (entry,) = read_back(tmp_path, entry_line(NOW, event, (), ()))
    assert entry.event == CacheAssumed(worker_id="w", stored=[1, 2], removed=[3])


def test_prompt_is_read_back_blank_with_its_length(tmp_path):
    (entry,) = read_back(tmp_path, entry_line(NOW, an_arrival(tokens=10), (), ()))
    assert isinstance(entry.event, Arrived)
    assert entry.event.tokens == bytes(40)


def test_every_setting_is_recorded_or_without_effect():
    # Addresses are left out: they are validated, and have no effect on decisions.
    names = {name for name in RouterSettings.__struct_fields__ if not name.endswith(("_listen", "_redis"))}
    changed = {
        name: structs.replace(RouterSettings(), **{name: value})
        for name in names
        if (value := _another(getattr(RouterSettings(), name))) is not None
    }
    lost = {
        name for name, settings in changed.items() if deciding_settings(settings) == deciding_settings(RouterSettings())
    }
    assert lost <= {
        "router_id",
        "share_ports",
        "replicas_name",
        "grpc",
        "grpc_max_held_bytes",
        "store",
        "tenant_secret",
        "prompt_secret",
        "model_defaults",
        "access_log",
        "access_records",
        "record",
        "record_mib",
        "connect_timeout_seconds",
        "connection_seconds",
        "drain_timeout_ms",
        "heartbeat_timeout_seconds",
        "max_reconnect_seconds",
        "catch_up_seconds",
    }, "does the machine look at it? then name it in `fleet.recording.format`, so that it is recorded; else here"


def _another(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case _:
            return None
