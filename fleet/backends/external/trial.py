"""Trial request: the shortest completion, which shows whether the engine of an external backend answers."""

import msgspec

from fleet.backends.external.http_client import FIRST_SERVER_ERROR, BackendUnreachable, ServerAddress, http_request
from fleet.backends.external.silence import TrialOutcome
from fleet.frontend.openai.relay_requests import CHAT, EMBEDDINGS

OK = 200
TEXT = "Hi"


async def try_request(address: ServerAddress, path: str, model: str, within_seconds: float) -> TrialOutcome:
    """Send a trial request of the kind that `path` serves, and return its outcome."""
    try:
        status, _ = await http_request(address, b"POST", path, trial_body(path, model), within_seconds=within_seconds)
    except BackendUnreachable:
        return TrialOutcome.FAILED
    if status == OK:
        return TrialOutcome.ANSWERED
    return TrialOutcome.FAILED if status >= FIRST_SERVER_ERROR else TrialOutcome.REFUSED


def trial_body(path: str, model: str) -> bytes:
    if path == EMBEDDINGS:
        return msgspec.json.encode({"model": model, "input": TEXT})
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if path == CHAT else {"prompt": TEXT}
    return msgspec.json.encode({"model": model, **prompt, "max_tokens": 1})
