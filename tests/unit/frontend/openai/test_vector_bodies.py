"""Request bodies of the APIs for vectors: what Fleet reads in them, and which bodies it refuses."""

import json

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.frontend.openai.vector_bodies import InputsRequest, read_embeddings


def embeddings(**fields: object) -> InputsRequest:
    return read_embeddings(json.dumps({"input": "x", **fields}).encode(), RequestId("r1"), Nanos(5 * SECOND), None)


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"priority": 5}, -5),
        ({"fleet": {"priority": 10}}, 10),
        ({"priority": 5, "fleet": {"priority": 10}}, 10),
        ({"priority": 5, "fleet": {"session": "s"}}, -5),
    ],
)
def test_fleet_object_takes_precedence_over_the_priority(fields, priority):
    assert embeddings(**fields).shared.priority == priority


@pytest.mark.parametrize("priority", [-101, 101, 10**30])
def test_priority_out_of_range_is_named_as_it_was_sent(priority):
    with pytest.raises(RequestRejected) as refused:
        embeddings(priority=priority)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, "priority")
