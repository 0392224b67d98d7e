"""Tests of gRPC channels that are opened again after renewals of their certificates."""

import inspect
from pathlib import Path

import pytest

from kvstore.clock import SECOND
from kvstore.security.certificates import CertificateFiles
from kvstore.security.renewed_channels import KEPT_CHANNELS, RenewedAioChannel, RenewedChannel
from tests.support.certificates import Authority
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import until

pytestmark = pytest.mark.integration

RENEWALS = KEPT_CHANNELS + 3


class OpenedChannel:
    """A channel whose one method returns the channel's number."""

    def __init__(self, number):
        self.number = number
        self.is_open = True

    def unary_unary(self, _method):
        return lambda: self.number

    def close(self):
        self.is_open = False


class OpenedAioChannel(OpenedChannel):
    async def close(self, _grace):
        self.is_open = False


@pytest.fixture(params=[(RenewedChannel, OpenedChannel), (RenewedAioChannel, OpenedAioChannel)], ids=["sync", "aio"])
async def renewed(request, tmp_path):
    """Return a channel, all channels that it has opened, and a function that renews its authority."""
    kind, opened = request.param
    served, clock = tmp_path / "served.pem", ManualClock()

    def renew(name):
        served.write_bytes(Path(Authority(tmp_path, name).file).read_bytes())
        clock.move(2 * SECOND)

    renew("first")
    channels = []

    def open_channel(_credentials):
        channels.append(opened(len(channels)))
        return channels[-1]

    return kind(CertificateFiles(authority=str(served), clock=clock), open_channel), channels, renew


async def test_calls_go_over_the_channel_with_the_renewed_files(renewed):
    channel, _, renew = renewed
    call = channel.unary_unary("/method")
    assert [call(), call()] == [0, 0]
    renew("second")
    assert [call(), channel.unary_unary("/method")()] == [1, 1]


async def test_few_earlier_channels_stay_open_after_many_renewals(renewed):
    channel, channels, renew = renewed
    call = channel.unary_unary("/method")
    for number in range(RENEWALS):
        renew(f"authority-{number}")
        assert call() == number + 1
    await until(lambda: sum(each.is_open for each in channels) == KEPT_CHANNELS + 1)
    assert [each.number for each in channels if not each.is_open] == list(range(RENEWALS - KEPT_CHANNELS))

    closing = channel.close()
    if inspect.isawaitable(closing):
        await closing
    assert not any(each.is_open for each in channels)
