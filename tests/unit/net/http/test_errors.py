import json

from fleet.core.errors import Reason, RequestRejected
from fleet.net.http.errors import error_body


def test_error_has_the_four_fields():
    error = json.loads(error_body(RequestRejected(Reason.QUEUE_FULL, "too busy")))["error"]

    assert error == {"message": "too busy", "type": "rate_limit_error", "param": None, "code": "queue_full"}
