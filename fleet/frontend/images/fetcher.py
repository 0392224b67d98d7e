"""Image fetcher: gets the images that clients name by http and https URLs, and connects only to allowed addresses.

Rules:

1. A name is resolved once for a connection. All its addresses are checked (`fleet.frontend.images.addresses`), and the connection
   goes to one of these addresses. So a name server cannot show one address to the check and another one to the connection.
2. Each redirect is checked like the first URL, and never leads from https to http.
3. Credentials in URLs are refused. The fetcher sends no cookies, and it uses no proxy and no credentials of its environment.
4. The content is read in pieces and counted against the limits of the request and of the process. Compressed answers are refused,
   because images are compressed already, and a small answer could become a huge file.
5. All images of a request share one time limit. When it is reached, or when the client leaves, the connections are closed.
6. One tenant may use at most half of each limit: concurrent fetches, concurrent name lookups, waiting images, and memory for images. Even if
   half of a limit is less than one, a tenant may have one fetch and one lookup at a time. So the images of one tenant cannot keep the
   images of other tenants from being fetched. Without tenants there is no such limit. A lookup counts until the name server answers, even
   if no request waits for it any more, because the thread of the lookup cannot be interrupted. The end of the process does not wait for
   such threads.
7. Errors do not tell whether a name is unknown or belongs to a private address. The HTTP status is the only part of a server's answer that
   they contain.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected, invalid
from fleet.core.requests import RemoteImage
from fleet.frontend.images.addresses import AddressRule
from fleet.frontend.images.files import FORMATS, check_images, checked_pixels
from fleet.router.settings.images import ImageSettings, host_and_port
from kvstore.tiers.daemon_threads import DaemonThreads

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a name for a port. It raises OSError if there are none."""

MIB = 1 << 20
MAX_URL_CHARACTERS = 4096
# Maximum number of images, of all requests together, that wait or are fetched at one time. A request that would exceed it is rejected.
MAX_WAITING = 256
PARALLEL = 4  # maximum number of images of one request that are fetched at one time; its other images wait
RETRY_AFTER_MS = 1000

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset(
    {
        HTTPStatus.MOVED_PERMANENTLY,
        HTTPStatus.FOUND,
        HTTPStatus.SEE_OTHER,
        HTTPStatus.TEMPORARY_REDIRECT,
        HTTPStatus.PERMANENT_REDIRECT,
    }
)
_HEADERS = {
    "Accept": ", ".join(f"image/{kind.lower()}" for kind in FORMATS),
    "Accept-Encoding": "identity",
    "User-Agent": "fleet",
}


class FetchOutcome(StrEnum):
    """How the fetch of an image ended. The values are labels of a metric."""

    FETCHED = "fetched"
    REFUSED = "refused"  # the URL or its content is not allowed, or the server did not deliver the image
    BUSY = "busy"  # too many images wait, too many bytes are held, or too many names are looked up
    CANCELLED = "cancelled"  # the client left, or another image of the request failed


class ImageFetcher:
    """Fetches images for all requests of one router process. `close` ends the threads that look up names."""

    def __init__(self, settings: ImageSettings, resolve: Resolve | None = None) -> None:
        """Create the fetcher; it opens no connection yet.

        Args:
            settings: The limits, and what may be fetched.
            resolve: Resolver of names; None: the system's resolver, called in threads.

        Raises:
            ConfigurationRefused: The certificates in the file `settings.authority` cannot be read.
        """
        self._settings = settings
        self._rule = AddressRule(settings.networks)
        self._hosts = tuple((_canonical(host), port) for host, port in map(host_and_port, settings.hosts))
        self._tls = load_trust(settings.authority, field="images.authority")
        self._threads = DaemonThreads("image-names", settings.max_fetches) if resolve is None else None
        self._resolve = self._system_addresses if resolve is None else resolve
        self._all = _Budget(settings.max_fetches, MAX_WAITING, settings.max_held_mib * MIB)
        self._tenants: dict[str, _Budget] = {}  # budget of each tenant with a fetch, a lookup or fetched images now
        self.outcomes = dict.fromkeys(FetchOutcome, 0)

    @property
    def held_bytes(self) -> int:
        """Number of bytes of the fetched images of requests that have not ended."""
        return self._all.held_bytes

    def close(self) -> None:
        """End the threads that look up names, without waiting for name servers."""
        if self._threads is not None:
            self._threads.close()

    @asynccontextmanager
    async def fetched(
        self,
        images: Sequence[bytes],
        remote: Sequence[RemoteImage],
        *,
        tenant: str = "",
        most_bytes: int,
        within_seconds: float,
    ) -> AsyncIterator[tuple[bytes, ...]]:
        """Fetch the images of a request; yield all its images in their order. Their memory counts as held until the context ends.

        Args:
            images: All images of the request: the content of each image, or empty bytes if it has to be fetched.
            remote: The images to fetch. A URL that several images have is fetched once.
            tenant: The tenant of the request; empty: there are no tenants.
            most_bytes: The limit for the content of all images together.
            within_seconds: Time until the deadline of the request. If the limit in the settings is shorter, it applies instead.

        Raises:
            RequestRejected: INVALID_ARGUMENT with the field of a URL that may not be fetched or gave no allowed image in
                time, or QUEUE_FULL if a limit of the process or the tenant is reached (rule 6).
        """
        budgets = self._budgets(tenant)
        held = _HeldBytes(budgets, most_bytes - sum(map(len, images)))
        try:
            first: dict[str, RemoteImage] = {}
            for each in remote:
                first.setdefault(each.url, each)
            contents = await self._fetch_all(first, held, budgets, min(within_seconds, self._settings.timeout_seconds))
            complete = list(images)
            for each in remote:
                complete[each.place] = contents[each.url]
            check_images(complete, {each.place: each.field for each in remote})
            yield tuple(complete)
        finally:
            held.release()
            self._forget_unused(tenant)

    def _forget_unused(self, tenant: str) -> None:
        if tenant in self._tenants and self._tenants[tenant].is_unused:
            del self._tenants[tenant]

    def _budgets(self, tenant: str) -> "tuple[_Budget, ...]":
        """Return the budgets that limit a request: that of the tenant, if there are tenants, and that of the process (rule 6)."""
        if not tenant:
            return (self._all,)
        if tenant not in self._tenants:
            self._tenants[tenant] = self._all.half(tenant)
        return self._tenants[tenant], self._all

    async def _fetch_all(
        self,
        first: Mapping[str, RemoteImage],
        held: "_HeldBytes",
        budgets: "tuple[_Budget, ...]",
        within_seconds: float,
    ) -> Mapping[str, bytes]:
        if any(each.waiting + len(first) > each.max_waiting for each in budgets):
            self.outcomes[FetchOutcome.BUSY] += len(first)
            raise _busy("too many images wait to be fetched")
        due = asyncio.get_running_loop().time() + within_seconds
        own_places = asyncio.Semaphore(PARALLEL)
        for each in budgets:
            each.waiting += len(first)
        try:
            async with asyncio.TaskGroup() as tasks:
                places = (own_places, *(each.places for each in budgets))
                running = {
                    url: tasks.create_task(self._counted(image, held, places, due, within_seconds))
                    for url, image in first.items()
                }
        except ExceptionGroup as group:
            raise _first_rejection(group) from None
        finally:
            for each in budgets:
                each.waiting -= len(first)
        return {url: task.result() for url, task in running.items()}

    async def _counted(
        self,
        image: RemoteImage,
        held: "_HeldBytes",
        places: Sequence[asyncio.Semaphore],
        due: float,
        within_seconds: float,
    ) -> bytes:
        """Fetch one image, at the latest until `due` by the event loop's clock, and count the outcome."""
        outcome = FetchOutcome.CANCELLED
        try:
            async with asyncio.timeout_at(due), AsyncExitStack() as taken:
                for each in places:
                    await taken.enter_async_context(each)
                content = await self._fetch(image, held)
                checked_pixels(content, image.field)
                outcome = FetchOutcome.FETCHED
                return content
        except TimeoutError:
            outcome = FetchOutcome.REFUSED
            raise invalid(image.field, f"could not be fetched within {within_seconds:g} s") from None
        except RequestRejected as refused:
            outcome = FetchOutcome.BUSY if refused.reason is Reason.QUEUE_FULL else FetchOutcome.REFUSED
            raise
        finally:
            self.outcomes[outcome] += 1

    async def _fetch(self, image: RemoteImage, held: "_HeldBytes") -> bytes:
        field = image.field
        if len(image.url) > MAX_URL_CHARACTERS:
            raise invalid(field, f"is a URL of more than {MAX_URL_CHARACTERS} characters")
        try:
            url = URL(image.url)
            for _ in range(self._settings.max_redirects + 1):
                self._check_url(url, field)
                addresses = await self._addresses(url, field, held.budgets)
                async with (
                    self._session(addresses) as session,
                    session.get(url, headers=_HEADERS, allow_redirects=False) as answer,
                ):
                    if answer.status not in _REDIRECTS:
                        return await _content(answer, field, held)
                    following = url.join(URL(answer.headers.get("Location", "")))
                    if url.scheme == "https" and following.scheme == "http":
                        raise invalid(field, "redirects from https to http")
                    url = following.with_fragment(None)
        except aiohttp.ClientConnectorCertificateError:  # This class is also a ValueError, so it must come first.
            raise invalid(field, "cannot be fetched: the certificate of the server is not valid") from None
        except ValueError:
            raise invalid(field, "is not a valid URL, or redirects to an invalid URL") from None
        except aiohttp.ClientConnectionError:
            raise invalid(field, "cannot be fetched: there is no connection, or it broke off") from None
        except (aiohttp.ClientError, OSError):
            raise invalid(field, "cannot be fetched: the server does not speak HTTP, or its answer broke off") from None
        raise invalid(field, f"redirects more than {self._settings.max_redirects} times")

    def _check_url(self, url: URL, field: str) -> None:
        """Refuse a URL whose scheme, host or port is not allowed, or that has credentials. The host's addresses are not checked here."""
        host, port = _host(url), url.port
        if url.scheme not in _PORTS or not host:
            raise invalid(field, "must be a data URL, or an http or https URL with a host")
        if ":" in host and not _is_address(host):  # such as [a:b.example.com]; aiohttp would resolve it again (rule 1)
            raise invalid(field, "has a host in brackets that is not an IPv6 address")
        if url.raw_user is not None or url.raw_password is not None:
            raise invalid(field, "must not contain a user or a password")
        if not self._hosts:
            if port not in _PORTS.values():
                raise invalid(field, f"must use the port 80 or 443; images.hosts can name {host}:{port}")
        elif not any(_matches(host, port, entry) for entry in self._hosts):
            raise invalid(field, "is at a host or port that the setting images.hosts of this router does not name")

    async def _addresses(self, url: URL, field: str, budgets: "Sequence[_Budget]") -> "_Addresses":
        """Return the addresses of a URL's host. Refuse the image if there are none, or if one of them is not allowed (rule 1)."""
        host, port = _host(url), url.port
        assert port is not None
        found: Sequence[str] = ()
        if _is_address(host):
            found = (host,)
        else:
            with suppress(OSError, UnicodeError):
                found = await self._looked_up(host, port, budgets)
        if not found or not all(map(self._rule.allows, found)):
            raise invalid(
                field, "has no public address; the setting images.networks of the router can allow private networks"
            )
        return _Addresses(found)

    async def _looked_up(self, host: str, port: int, budgets: "Sequence[_Budget]") -> Sequence[str]:
        """Return the addresses of a name, and count the lookup against the budgets until it ends (rule 6).

        Raises:
            OSError: The name has no address.
            RequestRejected: QUEUE_FULL; too many lookups wait for name servers.
        """
        if any(each.lookups == each.max_lookups for each in budgets):
            raise _busy("name servers are slow")
        for each in budgets:
            each.lookups += 1

        async def counted() -> Sequence[str]:
            try:
                return await self._resolve(host, port)
            finally:
                for each in budgets:
                    each.lookups -= 1
                    self._forget_unused(each.tenant)

        return await asyncio.shield(counted())  # a request that ends early leaves the lookup running

    async def _system_addresses(self, host: str, port: int) -> Sequence[str]:
        """Look a name up in a thread of the fetcher, so that slow name servers delay no other lookup of the process."""
        assert self._threads is not None
        lookup = self._threads.submit(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        found = await asyncio.wrap_future(lookup)
        return tuple(dict.fromkeys(str(address[0]) for *_, address in found))

    def _session(self, addresses: "_Addresses") -> aiohttp.ClientSession:
        """Return an HTTP client for one connection to the checked addresses (rule 3)."""
        connector = aiohttp.TCPConnector(
            resolver=addresses, use_dns_cache=False, force_close=True, limit=1, ssl=self._tls
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),  # `fetched` limits the time
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )


class _Addresses(AbstractResolver):
    """Resolver for aiohttp that returns the checked addresses, whatever the name."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kinds = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in self._addresses]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST)
            for kind, address in kinds
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        pass


class _Budget:
    """Limits what all requests, or the requests of one tenant, use at a time: fetches, name lookups, waiting images, bytes of images."""

    def __init__(self, places: int, waiting: int, held_bytes: int, tenant: str = "") -> None:
        self.tenant = tenant  # empty: the budget of all requests of the process
        self.places = asyncio.Semaphore(places)
        self.max_waiting = waiting
        self.max_held_bytes = held_bytes
        self.waiting = 0  # number of images that wait or are fetched
        self.held_bytes = 0
        self.max_lookups = places
        self.lookups = 0  # number of lookups that have not ended

    def half(self, tenant: str) -> "_Budget":
        """Return an unused budget for a tenant, with half of the limits of this one, but at least one fetch and one lookup at a time."""
        return _Budget(max(1, self.max_lookups // 2), self.max_waiting // 2, self.max_held_bytes // 2, tenant)

    @property
    def is_unused(self) -> bool:
        return not (self.waiting or self.held_bytes or self.lookups)


class _HeldBytes:
    """Counts the bytes of the fetched images of one request against the request's own limit and against the budgets."""

    def __init__(self, budgets: Sequence[_Budget], most: int) -> None:
        self.budgets = budgets
        self._most = most
        self._taken = 0

    def check(self, further: int, field: str) -> None:
        """Refuse the image at `field` if there is no room for `further` bytes of it."""
        if self._taken + further > self._most:
            raise invalid(field, f"is larger than the {self._most:,} bytes that the request may have")
        if any(each.held_bytes + further > each.max_held_bytes for each in self.budgets):
            raise _busy("the images of other requests take all memory for fetched images")

    def take(self, count: int, field: str) -> None:
        self.check(count, field)
        self._taken += count
        for each in self.budgets:
            each.held_bytes += count

    def release(self) -> None:
        for each in self.budgets:
            each.held_bytes -= self._taken
        self._taken = 0


async def _content(answer: aiohttp.ClientResponse, field: str, held: _HeldBytes) -> bytes:
    """Read the content of an answer. Refuse the image if the status is not 200, or the content is compressed or too large (rule 4)."""
    if answer.status != HTTPStatus.OK:
        raise invalid(field, f"cannot be fetched: the server answers with status {answer.status}")
    if answer.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise invalid(field, "is served in compressed form; the server must send the image file as it is")
    held.check(answer.content_length or 0, field)
    content = bytearray()
    async for part in answer.content.iter_any():
        held.take(len(part), field)
        content += part
    return bytes(content)


def load_trust(authority: str, *, field: str) -> ssl.SSLContext:
    """Return the TLS context that verifies https servers by the certificates in the file `authority`.

    If `authority` is empty, the system's certificates are used.

    Raises:
        ConfigurationRefused: The file cannot be used. `field` is the path of the setting, for the message.
    """
    try:
        return ssl.create_default_context(cafile=authority or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationRefused(f"{field}: {authority}: {error.strerror or error}") from error


def _host(url: URL) -> str:
    """Return the host of a URL in ASCII and lower case, without a final dot; empty if there is none."""
    return _canonical((url.raw_host or "").lower().rstrip("."))


def _canonical(host: str) -> str:
    """Return a host in the form in which hosts are compared: an IP address in its shortest form, a name unchanged."""
    return str(ip_address(host)) if _is_address(host) else host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _matches(host: str, port: int | None, entry: tuple[str, str]) -> bool:
    """Return whether an entry of `ImageSettings.hosts` names this host and port.

    An entry ``*.name`` names all hosts below ``name``. An entry without a port names the ports 80 and 443.
    """
    name, allowed_port = entry
    if (str(port) != allowed_port) if allowed_port else port not in _PORTS.values():
        return False
    return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name


def _busy(why: str) -> RequestRejected:
    return RequestRejected(
        Reason.QUEUE_FULL, f"{why}; send the image as a data URL, or try again", retry_after_ms=RETRY_AFTER_MS
    )


def _first_rejection(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first rejection of a group. If there is none, return the first error, which then indicates a bug."""
    rejections = [each for each in group.exceptions if isinstance(each, RequestRejected)]
    return rejections[0] if rejections else group.exceptions[0]
