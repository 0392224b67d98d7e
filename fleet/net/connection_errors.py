"""Connection errors of aiohttp: converts them to a text for a status or a log."""

import aiohttp


def connection_problem(error: Exception) -> str:
    """Return a text that says what failed. If a host name cannot be resolved, the text contains the name."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} does not resolve"
    return type(error).__name__
