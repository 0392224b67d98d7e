"""Connection errors of aiohttp: converts them to a text for a status or a log."""

import aiohttp


def connection_problem(error: Exception) -> str:
    """Return the name of the error's type; if a host name cannot be resolved, return a text with the host name."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} does not resolve"
    return type(error).__name__
