"""Address rule of image URLs: only public addresses are allowed, in whichever notation an address is written."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fleet.frontend.images.addresses import AddressRule, is_public

PRIVATE_V4 = [
    ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
PRIVATE_V6 = [
    ip_network(network)
    for network in (
        "::/96",  # unspecified, loopback and the deprecated IPv4-compatible addresses
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
]
PUBLIC = AddressRule()

any_v4 = st.integers(0, 2**32 - 1).map(IPv4Address)
any_v6 = st.integers(0, 2**128 - 1).map(IPv6Address)


def inside(networks):
    """Return a strategy for the addresses of these networks."""
    return st.sampled_from(networks).flatmap(
        lambda network: st.integers(int(network[0]), int(network[-1])).map(type(network[0]))
    )


@given(inside(PRIVATE_V4) | inside(PRIVATE_V6))
@example(IPv4Address("169.254.169.254"))
@example(IPv4Address("168.63.129.16"))
@example(IPv6Address("fd00:ec2::254"))
@example(IPv6Address("::1"))
@example(IPv6Address("::"))
def test_special_address_is_refused(address):
    assert not PUBLIC.allows(str(address))


@given(any_v4)
def test_v4_address_is_allowed_unless_it_is_special(address):
    special = any(address in network for network in PRIVATE_V4) or address == IPv4Address("168.63.129.16")

    assert PUBLIC.allows(str(address)) is not special


@given(any_v4)
@example(IPv4Address("127.0.0.1"))
def test_address_that_stands_for_another_is_judged_as_that(address):
    mapped = IPv6Address((0xFFFF << 32) | int(address))
    translated = IPv6Address(int(IPv6Address("64:ff9b::")) | int(address))

    assert PUBLIC.allows(str(mapped)) == PUBLIC.allows(str(translated)) == PUBLIC.allows(str(address))


@given(any_v4)
def test_tunnelled_address_is_refused_whatever_it_reaches(address):
    for_6to4 = IPv6Address((0x2002 << 112) | (int(address) << 80) | 1)
    compatible = IPv6Address(int(address))
    local_nat64 = IPv6Address(int(IPv6Address("64:ff9b:1::")) | int(address))

    assert not any(PUBLIC.allows(str(each)) for each in (for_6to4, compatible, local_nat64))


@given(any_v6)
def test_v6_address_outside_global_unicast_is_refused(address):
    assume(address.ipv4_mapped is None and address not in ip_network("64:ff9b::/96"))
    assume(address not in ip_network("2000::/3"))

    assert not PUBLIC.allows(str(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2001:4860:4860::8888", "64:ff9b::808:808"]
)
def test_public_address_is_allowed(address):
    assert PUBLIC.allows(address)
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "0x7f000001", "2130706433", "fe80::1%eth0", "2606:4700::1%1"]
)
def test_text_that_is_no_plain_address_is_refused(text):
    assert not PUBLIC.allows(text)


@given(inside(PRIVATE_V4))
def test_named_network_is_allowed_and_no_other(address):
    rule = AddressRule(["127.0.0.0/8", "fd00::/8"])

    assert rule.allows(str(address)) == (address in ip_network("127.0.0.0/8"))
    assert rule.allows("fd12::1")
    assert not rule.allows("fc00::1")
    assert rule.allows("::ffff:127.0.0.1")
