"""Options of the clients: unknown names are refused before anything is sent."""

import pytest

from fleet.client import AsyncClient, Client, InvalidRequest

ADDRESS = "127.0.0.1:1"  # no router listens there, so an `InvalidRequest` is raised before anything is sent


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda client: client.complete("x", max_token=2),
            "max_token: there is no such option; did you mean 'max_tokens'?",
        ),
        (
            lambda client: client.generate("x", temprature=1),
            "temprature: there is no such option; did you mean 'temperature'?",
        ),
        (lambda client: client.generate("x", xyz=1), "xyz: there is no such option"),
        (
            lambda client: client.embed(["x"], dimension=4),
            "dimension: there is no such option; did you mean 'dimensions'?",
        ),
        (lambda client: client.embed([], max_tokens=4), "max_tokens: there is no such option"),
        (lambda client: client.classify(["x"], dimensions=4), "dimensions: there is no such option"),
    ],
)
async def test_unknown_option_is_refused_with_the_nearest_name(call, message):
    with Client(ADDRESS) as client, pytest.raises(InvalidRequest) as refused:
        call(client)
    assert (refused.value.message, refused.value.field) == (message, message.split(":")[0])

    async with AsyncClient(ADDRESS) as client:
        with pytest.raises(InvalidRequest) as refused:
            await call(client)
    assert refused.value.message == message
