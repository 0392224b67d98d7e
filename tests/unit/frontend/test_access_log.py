"""The access log's treatment of names that clients choose."""

import pytest

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
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
