"""Address rule: which network addresses the router may connect to when a client names a server.

`fleet.frontend.images.fetcher` applies it before each connection.

Rules:

1. Only public addresses are allowed: global unicast addresses that no registry has set aside for another purpose. Python's
   `ipaddress` knows most addresses with a special purpose. This module lists the others, and those that only later versions of
   Python know.
2. If an IPv6 address contains an IPv4 address, the rules apply to the IPv4 address. Such addresses are mapped addresses
   (RFC 4291, 2.5.5.2) and addresses with the well-known prefix of NAT64 (RFC 6052, 2.1). Tunnels (6to4, Teredo) and
   prefixes for local use are refused.
3. Metadata services of clouds are at link-local or private addresses, so they are refused. Only Azure's wire server is at a
   public address; this address is refused because this module lists it.
4. The operator may allow networks that are not public.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address

_REFUSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "192.0.0.0/24",  # protocol assignments (RFC 6890); some clouds have services there
            "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
            "168.63.129.16/32",  # Azure's wire server and name server
        ),
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")  # all global unicast addresses that are assigned (RFC 4291, 2.4)
_REFUSED_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo among them (RFC 2928)
            "2001:db8::/32",  # reserved for examples in documentation (RFC 3849)
            "2002::/16",  # 6to4 (RFC 3056)
            "3fff::/20",  # reserved for examples in documentation (RFC 9637)
        ),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressRule:
    """Decides which addresses the router may connect to."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Create the rule; `networks` are allowed although they are not public. Each is in CIDR notation, such as ``10.0.0.0/8``."""
        self._networks = tuple(map(ip_network, networks))

    def allows(self, address: str) -> bool:
        """Return whether an address may be connected to. Text that is no address is not allowed."""
        try:
            given = ip_address(address)
        except ValueError:
            return False
        meant = _meant(given)
        return is_public(meant) or any(each in network for each in {given, meant} for network in self._networks)


def is_public(address: Address) -> bool:
    """Return whether an address is a public address of one host, and not one for a special purpose (rules 1 to 3)."""
    address = _meant(address)
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address.scope_id is not None or address not in _PUBLIC_V6:
        return False
    return not any(address in network for network in _REFUSED_V6)


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address contains, or the address itself if it contains none (rule 2)."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
