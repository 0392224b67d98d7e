"""Connection errors of aiohttp in words for a status or a log. Pure."""

import aiohttp


def connection_problem(error: Exception) -> str:
    """Return what failed; a name that does not resolve is named, because the error's type does not say it."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} does not resolve"
    return type(error).__name__
