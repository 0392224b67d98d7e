"""TLS for streams between routers and workers on different hosts: certificates on both ends, or on the worker's only.

Streams over Unix sockets need none. Without an authority a worker takes whoever can connect: for closed networks.
"""

import ssl
from collections.abc import Callable

from fleet.errors import ConfigurationRefused
from kvstore.credentials import Credentials


def of_worker(field: str, credentials: Credentials) -> ssl.SSLContext | None:
    """What a worker listens with; None: without TLS.

    Args:
        field: Of the settings; messages begin with it.
        credentials: The worker's certificate and key; with an authority, routers have to show a certificate of it.

    Raises:
        ConfigurationRefused: A file cannot be used, or something is set that streams know nothing of.
    """
    if not credentials.certificate and credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: certificates are looked at within TLS: set certificate and key")
    return _made(field, credentials, lambda: ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), bool(credentials.key))


def of_router(field: str, credentials: Credentials) -> ssl.SSLContext | None:
    """What a router dials workers with; None: without TLS.

    Args:
        field: Of the settings; messages begin with it.
        credentials: The authority that signs workers' certificates, and what the router shows where they ask.

    Raises:
        ConfigurationRefused: A file cannot be used, or something is set that streams know nothing of.
    """
    if credentials.certificate and not credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: is needed to know a worker's certificate")
    return _made(field, credentials, ssl.create_default_context, bool(credentials.authority))


def _made(
    field: str, credentials: Credentials, make: Callable[[], ssl.SSLContext], wanted: bool
) -> ssl.SSLContext | None:
    if credentials.secret_file:
        raise ConfigurationRefused(
            f"{field}.secret_file: streams are protected by certificates, see certificate and key"
        )
    if not wanted:
        return None
    context = make()
    try:
        if credentials.certificate:
            context.load_cert_chain(credentials.certificate, credentials.key)
        if credentials.authority:
            context.load_verify_locations(credentials.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigurationRefused(f"{field}: a file cannot be used: {error}") from error
    return context
