"""Addresses that `fleet up` reserves for its router."""

from contextlib import ExitStack

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.local.topology import claim_address


def test_a_host_that_does_not_resolve_is_refused_in_words():
    with ExitStack() as held, pytest.raises(ConfigurationRefused) as refused:
        claim_address("router.http_listen", "nosuch.invalid:0", held)

    assert str(refused.value).startswith("router.http_listen: nosuch.invalid:0: ")
    assert "Unknown error" not in str(refused.value)
