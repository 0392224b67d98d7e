"""HTTP session for a trace collector: limits the size and the duration of the collector's answers.

OpenTelemetry's exporter reads each answer completely. Without the limits, an endpoint that never ends its answer, such
as one for live events, would use up the memory of every process that sends traces.
"""

from io import BytesIO
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from kvstore.clock import nanos
from kvstore.system_clock import MonotonicClock

# Maximum length of a collector's answer; a longer answer counts as a failed export. Usual answers are empty, or have a
# few hundred bytes.
MOST_ANSWER_BYTES = 64 << 10
PIECE_BYTES = 8 << 10


class BoundedAnswers(HTTPAdapter):
    """Sends requests and reads their answers, which may have at most `MOST_ANSWER_BYTES`."""

    def __init__(self, timeout_seconds: float) -> None:
        """Limit the time from the headers of each answer to the end of its body to `timeout_seconds`."""
        super().__init__()
        self._timeout = nanos(timeout_seconds)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: ARG002 - the answer is always read here
        timeout: float | tuple[float | None, float | None] | None = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
        proxies: dict[str, str] | None = None,
    ) -> requests.Response:
        """Send a request.

        Raises:
            requests.RequestException: The collector cannot be reached, or its answer is too long or too slow.
        """
        response = super().send(request, stream=True, timeout=timeout, verify=verify, cert=cert, proxies=proxies)
        try:
            response.raw = BytesIO(self._read(response.raw))
        except BaseException:
            response.close()
            raise
        return response

    def _read(self, body: Any) -> bytes:
        ends_at = MonotonicClock.now() + self._timeout
        content = b""
        while piece := body.read1(PIECE_BYTES, decode_content=True):
            content += piece
            if len(content) > MOST_ANSWER_BYTES:
                raise requests.RequestException(f"the answer is longer than {MOST_ANSWER_BYTES} bytes")
            if MonotonicClock.now() > ends_at:
                raise requests.RequestException("the answer takes too long")
        return content


def collector_session(timeout_seconds: float) -> requests.Session:
    """Return a session that accepts answers of at most `MOST_ANSWER_BYTES`.

    The body of an answer has to arrive within `timeout_seconds` after its headers.
    """
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAnswers(timeout_seconds))
    return session
