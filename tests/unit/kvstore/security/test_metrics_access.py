"""Access to metrics: which requests for the metrics page of a port are answered."""

from hashlib import sha256

import msgspec
import pytest

from kvstore.security.metrics_access import MetricsAccess, MetricsGuard

KEY = "a key of the monitoring"
DIGEST = sha256(KEY.encode()).hexdigest()
KEYED, OPENED, UNSAID = MetricsAccess(key_sha256=(DIGEST,)), MetricsAccess(open=True), MetricsAccess()


@pytest.mark.parametrize(
    ("access", "listen", "authorization", "admitted"),
    [
        (UNSAID, "127.0.0.1:1", "", True),
        (UNSAID, "[::1]:1", "", True),
        (UNSAID, "localhost:1", "", True),
        (UNSAID, "0.0.0.0:1", "", False),
        (UNSAID, "[::]:1", "", False),
        (UNSAID, "10.0.0.1:1", f"Bearer {KEY}", False),
        (OPENED, "0.0.0.0:1", "", True),
        (KEYED, "0.0.0.0:1", f"Bearer {KEY}", True),
        (KEYED, "0.0.0.0:1", f"bearer {KEY}", True),
        (KEYED, "127.0.0.1:1", "", False),
        (KEYED, "127.0.0.1:1", f"Bearer {KEY}x", False),
        (KEYED, "127.0.0.1:1", f"Basic {KEY}", False),
        (KEYED, "127.0.0.1:1", f"Bearer {DIGEST}", False),
        (KEYED, "127.0.0.1:1", "Bearer " + KEY * 10_000, False),
        (KEYED, "127.0.0.1:1", "Bearer \udcff\udcfe", False),
    ],
)
def test_metrics_are_read_with_a_key_or_where_the_port_is_open(access, listen, authorization, admitted):
    assert (MetricsGuard.of(access, listen).refusal(authorization) == "") is admitted


def test_refusals_say_what_to_set_or_send():
    assert "set metrics_access.key_sha256" in MetricsGuard.of(UNSAID, "0.0.0.0:1").refusal("")
    assert "send Authorization: Bearer KEY" in MetricsGuard.of(KEYED, "0.0.0.0:1").refusal("")
    assert MetricsGuard.of(KEYED, "0.0.0.0:1").refusal("Bearer x") == "the key is none of metrics_access.key_sha256"


@pytest.mark.parametrize("fields", [{"key_sha256": ["abc"]}, {"key_sha256": [DIGEST], "open": True}, {"key": KEY}])
def test_invalid_settings_are_refused(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, MetricsAccess)
