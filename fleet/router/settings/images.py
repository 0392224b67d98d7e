"""Image settings: whether and from where a router fetches the images that clients name by URLs."""

import re
from ipaddress import ip_network
from typing import Annotated

from msgspec import Meta, Struct

_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?")


class ImageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for images at http and https URLs. Without `fetch_urls`, images are taken only as data URLs."""

    fetch_urls: bool = False
    """True if the router fetches images at URLs that clients name. It then opens connections to servers that clients choose. Unless `hosts`
    and `networks` say otherwise, it connects only to public addresses at the ports 80 and 443. Name the `hosts` if you know them."""

    hosts: tuple[str, ...] = ()
    """The only hosts that images are fetched from, in lower case: ``images.example.com`` at the ports 80 and 443,
    ``images.example.com:8443`` at that port, ``*.example.com`` for all names below it. Redirects to other hosts are refused too. Empty:
    all hosts whose addresses are public or in `networks`."""

    networks: tuple[str, ...] = ()
    """Networks that images are fetched from although they are not public, such as ``10.20.0.0/16`` for an image store on your own network.
    Every tenant can then reach all servers in these networks at the ports 80 and 443, so name `hosts` as well."""

    authority: str = ""
    """PEM file with the certificates of the authorities that may sign certificates of https servers. Empty: the authorities of the
    operating system."""

    timeout_seconds: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """The longest time for all images of a request together, from the request's arrival to the last byte, redirects and waiting included. A
    request that takes longer is refused. Web servers answer within a second or two; a client that waits longer would rather have an error
    than a late first token."""

    max_redirects: Annotated[int, Meta(ge=0, le=20)] = 3
    """Maximum number of redirects for one image; a request whose image has more is refused. File stores and short links use one or two."""

    max_fetches: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Maximum number of images that are fetched at the same time, and of threads that look up host names. Further images wait; if more than
    256 are fetched or wait, requests are refused with 429. One tenant may use at most half of each limit."""

    max_held_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Memory in MiB for the fetched images of all requests, until the end of their answers. While it is full, requests with image URLs are
    refused with 429. One tenant may use at most half of it, and one request 32 MiB."""

    def __post_init__(self) -> None:
        for index, host in enumerate(self.hosts):
            if not _HOST.fullmatch(host) or not 0 < int(host_and_port(host)[1] or 1) < 1 << 16:
                raise ValueError(f"hosts[{index}]: {host!r} must be NAME, NAME:PORT or *.NAME, in lower case")
        for index, network in enumerate(self.networks):
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(
                    f"networks[{index}]: {error}; write the first address of the network, as 10.20.0.0/16"
                ) from error


def host_and_port(host: str) -> tuple[str, str]:
    """Return the name and the port of an entry of `ImageSettings.hosts`; the port is empty if the entry has none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host.strip("[]"), ""
    return name.strip("[]"), port
