"""Flight recorder: recordings are complete, limited in size and without content, and recording does not affect the router."""

import json
import os
from base64 import b64encode
from hashlib import sha256
from random import Random
from typing import get_type_hints

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.requests import Finish, JsonSchema, Logprobs, Sampling
from fleet.core.roles import Role
from fleet.core.work import Progress, Rejected
from fleet.frontend.text.image_keys import image_keys
from fleet.recording.flight_recorder import KEPT_RECORDINGS, MIB, FlightRecorder, open_recorded_machine
from fleet.recording.format import FORMAT, RecordingHead, entry_line
from fleet.recording.reader import Recording
from fleet.recording.traffic import recorded_requests
from fleet.router.messages import (
    Arrived,
    AttemptRejected,
    CacheAssumed,
    Dispatch,
    RouterTicked,
    WorkerJoined,
    WorkerStepped,
)
from fleet.router.observer import ObservedMachine
from fleet.router.placement.policies.built_in import policy
from fleet.router.settings.router import OpenAiWorkerSettings, RouterSettings
from fleet.router.tenants import TenantSettings
from fleet.sim.replay import RecordingReplay
from tests.support.builders import a_description, an_arrival, token_bytes

START = Nanos(5 * SECOND)


def a_flight(path, most_bytes=MIB, settings=None):
    """Return a recorder and the machine that it observes."""
    settings = settings or RouterSettings()
    head = RecordingHead(recording=FORMAT, fleet="0", began=START, began_unix=1, seed=7, settings=settings)
    recorder = FlightRecorder(path, most_bytes, head)
    return recorder, ObservedMachine(settings, Random(7), None, recorder.hash, observer=recorder)


def joined(worker_id="w0"):
    description = structs.replace(a_description(worker_id=worker_id, role=Role.BOTH), keeps_forms=True)
    return WorkerJoined(description=description, address="unix:/w")


def work_of(commands):
    return next(command.start.request_id for command in commands if isinstance(command, Dispatch))


def test_recording_is_complete_and_replays(tmp_path):
    path = tmp_path / "flight"
    recorder, machine = a_flight(path)
    with recorder:
        machine.handle(joined(), START)
        work = work_of(machine.handle(an_arrival(tokens=100), Nanos(START + 1)))
        machine.handle(
            WorkerStepped(worker_id="w0", progress=(Progress(request_id=work, token_ids=(5,)),)), Nanos(START + 2)
        )

    recording = Recording(path)
    entries = list(recording.entries())

    assert [type(entry.event).__name__ for entry in entries] == ["WorkerJoined", "Arrived", "WorkerStepped"]
    assert [len(keys) for keys in entries[1].keys] == [3]
    assert len(entries[1].event.tokens) == 400
    assert recording.end == "the router ended"
    assert path.stat().st_mode & 0o777 == 0o600
    replayed = RecordingReplay(path).run()
    assert replayed.agree
    assert (replayed.events, replayed.requests, replayed.commands) == (3, 1, 2)


def test_recording_has_no_content_and_no_secrets(tmp_path):
    path = tmp_path / "flight"
    secret = "sesame-opens"
    settings = RouterSettings(
        tenant_secret=secret,
        tenants_redis=f"redis://:{secret}@host/0",
        tenants={"acme": TenantSettings(weight=3.0, api_key_sha256=("ab" * 32,))},
        openai_workers=(OpenAiWorkerSettings(worker_id="far", url="https://far:1", model="far", api_key=secret),),
    )
    prompt = token_bytes([987_654_321] * 40)
    recorder, machine = a_flight(path, settings=settings)
    with recorder:
        machine.handle(joined(), START)
        sampling = Sampling(form=JsonSchema(secret), stop_token_ids=(987_654_321,))
        arrived = an_arrival(tokens=prompt, salt=secret.encode().ljust(32), sampling=sampling, tenant="acme")
        work = work_of(machine.handle(arrived, Nanos(START + 1)))
        answer = Progress(
            request_id=work, token_ids=(987_654_321,), logprobs=(Logprobs(-0.1, (987_654_321,), (-0.1,)),)
        )
        machine.handle(WorkerStepped(worker_id="w0", progress=(answer,)), Nanos(START + 2))
        said = Rejected(request_id=work, reason=Reason.INVALID_ARGUMENT, message=secret)
        machine.handle(AttemptRejected(worker_id="w0", rejected=said), Nanos(START + 3))
        resumed = an_arrival(request_id="r2", tokens=prompt, answered=(987_654_321,) * 30)
        assert isinstance(machine.handle(resumed, Nanos(START + 4))[0], Dispatch)

    content = path.read_text()

    for hidden in (
        secret,
        b64encode(secret.encode()).decode()[:-2],
        "abababab",
        "987654321",
        b64encode(prompt[:12]).decode(),
    ):
        assert hidden not in content
    assert Recording(path).head.settings.tenants == {"acme": TenantSettings(weight=3.0)}
    assert RecordingReplay(path).run().agree


def test_recording_leaves_out_every_byte_field_of_an_arrival():
    hidden = b"content of a client"
    fields = {name: str(kind) for name, kind in get_type_hints(Arrived).items() if "bytes" in str(kind)}
    filled = {name: (hidden, hidden) if kind.startswith("tuple") else hidden for name, kind in fields.items()}

    line = entry_line(START, an_arrival(**filled), [], [])

    assert {"tokens", "salt", "images"} <= filled.keys()
    assert b64encode(hidden) not in line
    assert line.count(b'"images":["",""]') == 1, "a replay needs their number"


def test_prompts_with_images_keep_their_block_keys(tmp_path):
    """Record prompts with images: the recorded block keys cover the images, so a replay shares exactly the blocks that were shared."""
    path, prompt = tmp_path / "flight", token_bytes([9, *range(500, 599)])
    keys = [
        image_keys(prompt, 32, b"", [sha256(image).digest()], placeholders=(9,)) for image in (b"cat", b"dog", b"cat")
    ]
    recorder, machine = a_flight(path)
    with recorder:
        machine.handle(joined("w0"), START)
        machine.handle(joined("w1"), START)
        for number, own in enumerate(keys):
            arrived = an_arrival(request_id=f"r{number}", tokens=prompt, images=(b"file",), keys={32: own})
            (sent,) = machine.handle(arrived, Nanos(START + 10 * number))
            ended = Progress(request_id=sent.start.request_id, token_ids=(5,), finish=Finish.LENGTH)
            machine.handle(WorkerStepped(worker_id=sent.worker_id, progress=(ended,)), Nanos(START + 10 * number + 1))

    arrivals = [entry.event for entry in Recording(path).entries() if isinstance(entry.event, Arrived)]
    assert [event.keys for event in arrivals] == [{32: own} for own in keys]
    cat, dog, again = [request.chain for request in recorded_requests(path, 32, lambda tokens: ())]
    assert cat == again
    assert not {*cat} & {*dog}
    assert RecordingReplay(path).run().agree


def test_full_recording_ends_with_a_note_and_router_goes_on(tmp_path, caplog):
    path = tmp_path / "flight"
    recorder, machine = a_flight(path, most_bytes=5000)
    with recorder:
        machine.handle(joined(), START)
        for number in range(100):
            machine.handle(an_arrival(request_id=f"r{number}"), Nanos(START + number))

    assert machine.snapshot().active == 100
    assert path.stat().st_size < 5200
    assert "recording stopped at its full size" in caplog.text
    replayed = RecordingReplay(path).run()
    assert replayed.agree
    assert 1 < replayed.events < 20
    assert replayed.notes == ["it ends because it has its full size (record_mib)"]


def test_event_that_breaks_the_machine_is_recorded(tmp_path):
    path = tmp_path / "flight"
    recorder, machine = a_flight(path)
    with recorder:
        machine.handle(joined(), START)
        machine.handle(an_arrival(), START)
        with pytest.raises(AssertionError):
            machine.handle(an_arrival(), START)  # a duplicate id, which the server would refuse before
    replayed = RecordingReplay(path).run()
    assert replayed.agree
    assert replayed.events == 3


def test_earlier_recordings_are_kept_and_rotated(tmp_path):
    path = tmp_path / "flight"
    for flight in range(KEPT_RECORDINGS + 2):
        recorder, machine = a_flight(path)
        with recorder:
            machine.handle(RouterTicked(), Nanos(START + flight))
    recorder, _ = a_flight(path)
    with recorder:
        pass
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["flight", *(f"flight.{number}" for number in range(1, KEPT_RECORDINGS + 1))]
    instants = [next(Recording(tmp_path / name).entries()).now - START for name in names]
    assert instants == [4, 3, 2, 1]


@pytest.mark.parametrize("name", ["absent/flight", "."])
def test_unwritable_file_is_refused_by_name(tmp_path, name):
    settings = RouterSettings(record=str(tmp_path / name))
    with pytest.raises(ConfigurationRefused, match=r"^record: .*: (No such file|Is a directory)"):
        open_recorded_machine(settings, 1, policy("fleet", {}), START)


def test_device_or_pipe_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigurationRefused, match=r"^record: .*/pipe: Is not a regular file"):
        open_recorded_machine(RouterSettings(record=str(path)), 1, policy("fleet", {}), START)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_ends_the_recording_only(tmp_path, caplog):
    path = tmp_path / "flight"
    (tmp_path / "flight.new").symlink_to("/dev/full")
    recorder, machine = a_flight(path)
    with recorder:
        machine.handle(joined(), START)
    assert machine.models()
    assert "recording stopped" in caplog.text
    assert "No space left" in caplog.records[-1].cause


def test_unwritable_event_ends_the_recording_only(tmp_path, caplog):
    path = tmp_path / "flight"
    recorder, machine = a_flight(path)
    with recorder:
        machine.handle(joined(), START)
        machine.handle(CacheAssumed(worker_id="w0", stored=[object()]), START)
        assert machine.handle(an_arrival(), START)
    assert "an event cannot be written" in caplog.text
    replayed = RecordingReplay(path).run()
    assert replayed.agree
    assert replayed.notes == ["it ends because a CacheAssumed could not be written"]


def test_recorded_machine_follows_its_settings(tmp_path):
    settings = RouterSettings(record=str(tmp_path / "flight"), policy="round_robin", max_queued=3)
    machine, recorder = open_recorded_machine(settings, 99, policy("round_robin", {}), START)
    with recorder:
        machine.handle(joined(), START)
    head = json.loads((tmp_path / "flight").read_text().splitlines()[0])
    assert (head["seed"], head["began"], head["settings"]["policy"]) == (99, START, "round_robin")
    assert head["settings"]["max_queued"] == 3
    assert head["settings"]["record"] == ""
