"""Connection errors of aiohttp: converts them to a text for a status or a log. Pure."""

import aiohttp


def connection_problem(error: Exception) -> str:
    """Return a text that says what failed, and which host name cannot be resolved, which the error's type does not say."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} does not resolve"
    return type(error).__name__
