from fleet.core.errors import Reason
from fleet.net.status_codes import REASON_STATUSES


def test_every_reason_has_a_status_by_whose_error_it_is():
    assert set(REASON_STATUSES) == set(Reason)
    for reason, status in REASON_STATUSES.items():
        assert 400 <= status.http < 600
        assert (status.openai == "invalid_request_error") == (status.http in (400, 404, 413)), reason
