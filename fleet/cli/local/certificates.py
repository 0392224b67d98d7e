"""Certificate of a local cluster: an authority that is made on the spot, and the router's certificate from it."""

import ipaddress
import os
import socket
from pathlib import Path

import trustme
from msgspec import structs

from fleet.local.runs import AUTHORITY
from fleet.local.settings import Topology

CERTIFICATE, KEY = "router.pem", "router.key"
ALWAYS = ("localhost", "127.0.0.1", "::1")


def with_certificate(topology: Topology, folder: Path) -> Topology:
    """Return the topology with the certificate that `cluster.tls` asks for, and write its files into the runtime folder.

    The authority's key is not kept, so nobody can sign another certificate with it. The certificate is for this machine's
    loopback addresses and for the hosts at which the router listens; an address of all interfaces adds the machine's name.
    """
    if not topology.cluster.tls:
        return topology
    router = topology.router
    listens = (router.http_listen, router.grpc_listen, router.kserve_listen)
    hosts = [listen.rpartition(":")[0].strip("[]") for listen in listens if listen]
    names = {*ALWAYS, *(host for host in hosts if not _is_any(host))}
    if any(_is_any(host) for host in hosts):
        names.add(socket.gethostname())
    authority = trustme.CA()
    issued = authority.issue_cert(*sorted(names))
    _write(folder / AUTHORITY, authority.cert_pem.bytes())
    _write(folder / CERTIFICATE, b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    _write(folder / KEY, issued.private_key_pem.bytes())
    tls = structs.replace(router.tls, certificate=str(folder / CERTIFICATE), key=str(folder / KEY))
    cluster = structs.replace(topology.cluster, tls=False)  # it is done
    return structs.replace(topology, cluster=cluster, router=structs.replace(router, tls=tls))


def _is_any(host: str) -> bool:
    """Return whether a host stands for all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 - with a mode
        file.write(content)
