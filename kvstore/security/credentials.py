"""Settings that name the credential files of a node or a client; `kvstore.security.channels` loads the files."""

from msgspec import Struct


class Credentials(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files with the credentials. A node and its clients have equal ones, except for the certificate and its key."""

    secret_file: str = ""
    """File whose content, without surrounding white space, is the deployment's secret of 16 bytes or more. ``openssl rand
    -hex 32`` makes one. Empty: no secret.
    """

    certificate: str = ""
    """PEM file of this end's certificate and of the certificates between it and the authority. Empty: no TLS on a node; on
    a client, no certificate.
    """

    key: str = ""
    """PEM file of the certificate's private key."""

    authority: str = ""
    """PEM file of the certificates that must have signed the other end's certificate. On a node: clients must show one.
    """

    insecure: bool = False
    """Allow listening beyond loopback without credentials. Everybody in that network can then read and write everything, so set this only in
    closed networks."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("credentials.key: certificate and key go together")
