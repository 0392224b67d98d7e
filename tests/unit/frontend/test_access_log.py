"""Access log: how it shows names that clients choose."""

import pytest
from msgspec import to_builtins

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.requests import CallDelta, Delta, Finish
from fleet.core.system_clock import SystemClock, unix_nanoseconds
from fleet.frontend.access_log import AccessLog, RequestTimes, quoted
from tests.support.builders import a_request
from tests.support.router.fake_router import FakeRouter


@pytest.mark.parametrize("name", ["tiny", "org/model-7b@main", ""])
def test_plain_names_stay_as_they_are(name):
    assert quoted(name) == name


@pytest.mark.parametrize("name", ["a b", "x=1", "line\nbreak", "\x1b[31mred", "ünïcode"])
def test_names_that_could_forge_a_field_are_quoted(name):
    assert quoted(name) == repr(name)


def test_long_names_are_cut():
    assert len(quoted("m" * 10_000)) == 128


def test_refused_request_id_cannot_forge_a_field(caplog):
    caplog.set_level("INFO", "fleet.access")
    access = AccessLog(FakeRouter(), SystemClock(), unix_nanoseconds, logs=True)
    entry = access.begin(a_request(id=RequestId("a outcome=stop")))

    entry.write(Reason.INVALID_ARGUMENT, usage=None, kv=(), model="tiny", times=RequestTimes(whole=0.001))

    (record,) = caplog.records
    assert record.request == "'a outcome=stop'"


class KeptRecords:
    """Stand-in for a file of access records; it keeps the records in memory."""

    content = True

    def __init__(self):
        self.written = []

    def write(self, record):
        self.written.append(to_builtins(record))


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        (
            (CallDelta(index=0, id="c1", name="search", arguments='{"q":'), CallDelta(index=0, arguments='"foxes"}')),
            {"calls": ({"id": "c1", "name": "search", "arguments": '{"q":"foxes"}'},)},
        ),
        ((), {}),
    ],
)
def test_record_with_content_has_the_tool_calls(deltas, calls):
    records = KeptRecords()
    entry = AccessLog(FakeRouter(), SystemClock(), unix_nanoseconds, logs=False, records=records).begin(a_request())

    for each in deltas:
        entry.note(Delta(text="", token_ids=(), calls=(each,)))
    entry.write(Finish.TOOL_CALLS, usage=None, kv=(), model="tiny", times=RequestTimes(whole=0.001))

    (record,) = records.written
    assert {name: value for name, value in record.items() if name == "calls"} == calls
    assert record["answer"] == ""
