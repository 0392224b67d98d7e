"""Named routers: finds the peer routers behind one name, such as a headless Service, by resolving the name regularly.

Rules:

1. Every address of the name is a router of the cluster. This router is among them: it recognises and skips the address
   at which it listens itself.
2. A router that is no longer behind the name is not dialled again. But an open connection to it stays open until one
   side closes it, because the router may still finish its requests.
3. While the name cannot be resolved, nothing changes. The same cause is logged only once in a row.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from ipaddress import ip_address
from typing import Any, Never

from fleet.core.errors import ConfigurationRefused
from fleet.membership.registry import ResolveAddresses
from kvstore.net.addresses import host_port, unix_path

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0  # seconds between two resolutions of the name, and time limit of one resolution


class NamedRouters:
    """Keeps a connection to each other router behind a name, while `follow` runs."""

    def __init__(self, name: str, listen: str, look_up: ResolveAddresses) -> None:
        """Check the addresses. The name is resolved only when `follow` runs.

        Args:
            name: ``host:port`` of all routers.
            listen: ``ip:port`` at which the other routers reach this router.
            look_up: Function that resolves the name.

        Raises:
            ConfigurationRefused: The name has no valid form, or this router cannot recognise itself by `listen`.
        """
        self._name = name
        self._look_up = look_up
        try:
            self._host, self._port = host_port(name)
        except ValueError as error:
            raise ConfigurationRefused(f"replicas_name: {error}") from error
        self._own = _own_address(listen)

    async def follow(self, keep_up: Callable[[str], Coroutine[Any, Any, Never]], connected: Collection[str]) -> Never:
        """Keep connections to the other routers behind the name, until cancelled.

        Args:
            keep_up: Function that keeps a connection to the router at an address, and opens it again when it ends.
            connected: The addresses of the routers that are connected; the caller keeps this collection up to date.
        """
        following: dict[str, asyncio.Task[Never]] = {}
        cause = ""
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    async with asyncio.timeout(RESOLVE_SECONDS):
                        found = await self._look_up(self._host, self._port)
                except (OSError, TimeoutError) as error:
                    if (why := str(error) or "no answer in time") != cause:
                        cause = why
                        log.warning("name of peer routers not resolved", extra={"address": self._name, "cause": why})
                else:
                    cause = ""
                    others = [each for each in found if host_port(each) != self._own]
                    for gone in following.keys() - {*others, *connected}:
                        following.pop(gone).cancel()
                    for address in others:
                        if address not in following:
                            following[address] = tasks.create_task(keep_up(address), name=f"replica {address}")
                await asyncio.sleep(RESOLVE_SECONDS)
        raise AssertionError("its tasks never end")


def _own_address(listen: str) -> tuple[str, int]:
    """Return the host and the port at which this router is found behind the name.

    Raises:
        ConfigurationRefused: The address is a Unix socket, malformed, a host name, or an unspecified address such as
            0.0.0.0. So it cannot be compared with the addresses behind the name.
    """
    if unix_path(listen):
        raise ConfigurationRefused(f"replicas_listen: {listen} cannot be reached by the routers of replicas_name")
    try:
        host, port = host_port(listen)
        if not ip_address(host).is_unspecified:
            return host, port
    except ValueError as error:
        raise ConfigurationRefused(f"replicas_listen: {error}; replicas_name needs ip:port of this router") from error
    raise ConfigurationRefused(
        f"replicas_listen: {listen} does not tell this router from the others of replicas_name: use its own IP address"
    )
