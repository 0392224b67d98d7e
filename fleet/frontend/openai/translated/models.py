"""Models in the form of Anthropic's Models API, made of the model objects of the OpenAI API."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import parse_qs

from fleet.core.errors import invalid
from fleet.frontend.openai.answers import Json

MAX_LIMIT = 1000  # Anthropic's limit for the models of one page; without `limit` a page has all of them
LAST_SECOND = 253_402_300_799  # the last second of the year 9999, after which RFC 3339 has no times


def model_info(listed: Mapping[str, object]) -> Json:
    """Return a model object in Anthropic's form. As in Anthropic's API, an unknown time is the beginning of 1970, and an unknown length is null."""
    created, length = listed.get("created"), listed.get("max_model_len")
    if not isinstance(created, int) or not 0 <= created <= LAST_SECOND:  # an external server may write anything
        created = 0
    tokens = length if isinstance(length, int) else None
    return {
        "type": "model",
        "id": listed["id"],
        "display_name": listed["id"],
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": tokens,
        "max_tokens": tokens,
    }


def models_page(listed: Sequence[Mapping[str, object]], query: bytes) -> Json:
    """Return the page of a list of models that a query asks for by `after_id` or `before_id`, and `limit`.

    Raises:
        RequestRejected: INVALID_ARGUMENT; a value of the query is wrong.
    """
    asked = {name: values[-1] for name, values in parse_qs(query[1:].decode("latin-1")).items()}
    limit = asked.get("limit", str(MAX_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise invalid("limit", f"must be an integer from 1 to {MAX_LIMIT}")
    size = int(limit) if "limit" in asked else len(listed)
    begin, end = 0, len(listed)
    if "after_id" in asked:
        begin = _place(listed, asked, "after_id") + 1
    if "before_id" in asked:
        end = _place(listed, asked, "before_id")
        page, has_more = listed[max(begin, end - size) : end], end - size > begin
    else:
        page, has_more = listed[begin : begin + size], begin + size < end
    return {
        "data": [model_info(each) for each in page],
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _place(listed: Sequence[Mapping[str, object]], asked: Mapping[str, str], field: str) -> int:
    for place, each in enumerate(listed):
        if each["id"] == asked[field]:
            return place
    raise invalid(field, f"{asked[field][:100]!r} is not served here")
