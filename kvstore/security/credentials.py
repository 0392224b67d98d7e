"""Settings that name the credential files of a node or a client; `kvstore.security.channels` loads the files."""

from msgspec import Struct


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files with the credentials.

    A node and its clients have the same secret and authority, but different certificates and keys.
    """

    secret_file: str = ""
    """File whose content, without surrounding white space, is the deployment's secret of 16 bytes or more. ``openssl rand
    -hex 32`` makes one. Empty: no secret.
    """

    certificate: str = ""
    """PEM file of this end's certificate and of the certificates between it and the authority. Empty: a node does not
    use TLS; a client shows no certificate.
    """

    key: str = ""
    """PEM file of the certificate's private key."""

    authority: str = ""
    """PEM file of authorities, one of which must have signed the certificate of the other end. If a node has this
    setting, each client has to show a certificate; without it, clients need none. A client without it does not use TLS.
    """

    insecure: bool = False
    """Allow listening beyond loopback without credentials. Everybody who reaches the node can then read and write all
    blocks, so set this only in closed networks."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("credentials.key: certificate and key go together")
