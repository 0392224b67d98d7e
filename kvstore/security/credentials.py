"""Settings that say how one proves who one is; `kvstore.security.channels` obeys them."""

from msgspec import Struct


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which files prove who one is: the same on a node and on its clients, but for the certificate."""

    secret_file: str = ""
    """File whose content, without white space around it, is the deployment's secret; 16 bytes or more. ``openssl rand -hex 32``
    makes one. Empty: none."""

    certificate: str = ""
    """PEM file of this end's certificate, and of those between it and the authority. Empty: no TLS on a node; on a
    client, no certificate to show."""

    key: str = ""
    """PEM file of the certificate's private key."""

    authority: str = ""
    """PEM file of the certificates that the other end's must be signed by. On a node: clients must show one."""

    insecure: bool = False
    """Listen beyond loopback although anybody there can read and write everything. For closed networks."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("credentials.key: certificate and key go together")
