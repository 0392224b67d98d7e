"""Image fetcher against a real web server on loopback, which the settings allow, and names that the test resolves."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.core.requests import RemoteImage
from fleet.core.validation import MAX_IMAGE_BYTES
from fleet.frontend.images.fetcher import MAX_URL_CHARACTERS, MAX_WAITING, FetchOutcome, ImageFetcher
from fleet.router.settings.images import ImageSettings
from tests.support.certificates import Authority
from tests.support.servers.images import ImageServer, an_image, an_image_server
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration

FIELD = "messages[0].content[1].image_url.url"
LONG_SECONDS = 60.0  # of tests that do not wait for the time limit


class Names:
    """Resolver whose answers the test writes; a list of lists gives another answer each time."""

    def __init__(self, **names: Any) -> None:
        self.names: Mapping[str, Any] = {name.replace("_", "."): given for name, given in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        given = self.names.get(host)
        if given is None:
            raise OSError("unknown name")
        return given[self.asked.count(host) - 1] if given and isinstance(given[0], list) else given


@pytest.fixture
async def server():
    async with an_image_server() as running:
        yield running


def a_fetcher(server: ImageServer, names: Names | None = None, **settings: Any) -> ImageFetcher:
    """Return a fetcher that may fetch from loopback at the server's port, by address and by the name `images.test`."""
    hosts = tuple(f"{host}:{server.port}" for host in ("127.0.0.1", "images.test", "other.test", "10.1.2.3"))
    given = {"hosts": hosts, "networks": ("127.0.0.0/8",), "timeout_seconds": LONG_SECONDS} | settings
    return ImageFetcher(ImageSettings(fetch_urls=True, **given), names or Names(images_test=["127.0.0.1"]))


async def fetch(
    fetcher: ImageFetcher,
    *urls: str,
    images: Sequence[bytes] = (),
    tenant: str = "",
    most_bytes: int = MAX_IMAGE_BYTES,
) -> tuple[bytes, ...]:
    remote = [RemoteImage(len(images) + place, url, f"{FIELD}{place or ''}") for place, url in enumerate(urls)]
    content = [*images, *[b"" for _ in urls]]
    async with fetcher.fetched(
        content, remote, tenant=tenant, most_bytes=most_bytes, within_seconds=LONG_SECONDS
    ) as fetched:
        assert fetcher.held_bytes == sum({each.url: len(fetched[each.place]) for each in remote}.values())
    assert fetcher.held_bytes == 0
    return fetched


async def refusal(fetcher: ImageFetcher, url: str, **options: Any) -> RequestRejected:
    """Return the rejection of an image, which names the field and leaves nothing behind."""
    with pytest.raises(RequestRejected) as refused:
        await fetch(fetcher, url, **options)
    assert fetcher.held_bytes == 0
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, FIELD)
    assert sum(fetcher.outcomes.values()) == fetcher.outcomes[FetchOutcome.REFUSED] == 1
    return refused.value


async def test_images_are_fetched_into_their_places(server):
    given = an_image("green")

    fetched = await fetch(a_fetcher(server), server.url("/red.png"), server.url("/blue"), images=[given])

    assert fetched == (given, an_image("red"), an_image("blue"))


async def test_fetch_uses_no_proxy_cookies_or_credentials(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    await fetch(a_fetcher(server), server.url("/red.png#part", "IMAGES.test."))

    (seen,) = server.seen
    assert {name.lower() for name in seen.headers} == {"host", "accept", "accept-encoding", "connection", "user-agent"}
    assert seen.headers["Accept-Encoding"] == "identity"
    assert seen.host.lower() == f"images.test:{server.port}"


async def test_same_url_is_fetched_once(server):
    fetched = await fetch(a_fetcher(server), server.url("/red.png"), server.url("/red.png"))

    assert fetched == (an_image("red"), an_image("red"))
    assert len(server.seen) == 1


async def test_name_is_resolved_once_and_its_checked_address_used(server):
    names = Names(images_test=[["127.0.0.1"], ["10.0.0.1"]])

    await fetch(a_fetcher(server, names), server.url("/red.png", "images.test"))

    assert names.asked == ["images.test"]


async def test_redirect_is_resolved_and_checked_again(server):
    names = Names(images_test=[["127.0.0.1"], ["10.0.0.1"]])
    url = server.url(f"/to?url={server.url('/red.png', 'images.test')}", "images.test")

    refused = await refusal(a_fetcher(server, names), url)

    assert "no public address" in refused.message
    assert names.asked == ["images.test", "images.test"]
    assert [seen.path for seen in server.seen] == ["/to"]


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.1"],
        ["8.8.8.8", "10.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["fe80::1%eth0"],
        [],
        None,
    ],
)
async def test_name_without_only_public_addresses_is_refused_alike(server, addresses):
    names = Names(images_test=addresses) if addresses is not None else Names()

    refused = await refusal(a_fetcher(server, names), server.url("/red.png", "images.test"))

    assert refused.message.removeprefix(f"{FIELD}: ").startswith("has no public address; the setting images.networks")
    assert server.seen == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://10.1.2.3:PORT/red.png", "no public address"),
        ("http://images.test/red.png", "images.hosts"),
        ("http://images.test:1/red.png", "images.hosts"),
        ("http://evil.test:PORT/red.png", "images.hosts"),
        ("http://user@images.test:PORT/red.png", "a user or a password"),
        ("http://:secret@images.test:PORT/red.png", "a user or a password"),
        ("http://images.test:PORT@evil.test/", "a user or a password"),
        ("http://[a:b.evil.test]:PORT/red.png", "not an IPv6 address"),
        ("http://[v1.a:b.evil.test]:PORT/red.png", "not an IPv6 address"),
        ("http:///red.png", "http or https URL with a host"),
        ("http://images.test:99999/", "not a valid URL"),
        ("http://[::1/", "not a valid URL"),
        ("http://images.test:PORT/to?url=file:///etc/passwd", "http or https URL with a host"),
        ("http://images.test:PORT/to?url=http://evil.test/", "images.hosts"),
        ("http://images.test:PORT/to?url=http://10.1.2.3:PORT/red.png", "no public address"),
        ("http://images.test:PORT/to?url=http://u@images.test:PORT/", "a user or a password"),
        ("http://images.test:PORT/loop", "redirects more than 3 times"),
        ("http://images.test:PORT/nowhere", "redirects more than 3 times"),
        ("http://images.test:PORT/none", "status 404"),
        ("http://images.test:PORT/page", "is no image"),
        ("http://images.test:PORT/gzip", "compressed form"),
        ("http://images.test:PORT/cut", "broke off"),
        ("http://images.test:PORT/" + "x" * MAX_URL_CHARACTERS, "characters"),
    ],
)
async def test_url_that_gives_no_image_is_refused_by_field(server, url, message):
    refused = await refusal(a_fetcher(server), url.replace("PORT", str(server.port)))

    assert message in refused.message
    assert "evil" not in "".join(seen.host for seen in server.seen)


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]", "localhost", "0.0.0.0"])
async def test_other_spelling_of_loopback_is_refused_without_a_network(server, host):
    settings = ImageSettings(fetch_urls=True, hosts=(f"{host}:{server.port}",))
    fetcher = ImageFetcher(settings)

    refused = await refusal(fetcher, server.url("/red.png", host))
    fetcher.close()

    assert "no public address" in refused.message
    assert server.seen == []


async def test_name_is_looked_up_by_the_system_by_default(server):
    fetcher = ImageFetcher(
        ImageSettings(fetch_urls=True, hosts=(f"localhost:{server.port}",), networks=("127.0.0.0/8", "::1/128"))
    )

    assert await fetch(fetcher, server.url("/red.png", "localhost")) == (an_image("red"),)

    fetcher.close()


STOP_DURING_A_LOOKUP = """
import asyncio, socket, threading
from fleet.core.requests import RemoteImage
from fleet.frontend.images.fetcher import ImageFetcher
from fleet.router.settings.images import ImageSettings

asked = threading.Event()

def silent(*_, **__):
    asked.set()
    threading.Event().wait()

async def main():
    fetcher = ImageFetcher(ImageSettings(fetch_urls=True))
    image = RemoteImage(0, "http://images.test/red.png", "url")
    fetch = fetcher.fetched([b""], [image], most_bytes=1000, within_seconds=3600)
    request = asyncio.create_task(fetch.__aenter__())
    await asyncio.to_thread(asked.wait)
    fetcher.close()
    print("stopped", flush=True)

socket.getaddrinfo = silent
asyncio.run(main())
"""


async def test_process_ends_while_a_name_server_is_silent():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOP_DURING_A_LOOKUP, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            assert await process.communicate() == (b"stopped\n", b"")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0


class SilentNames(Names):
    """Name servers that do not answer for `images.test` until they may."""

    def __init__(self) -> None:
        super().__init__(images_test=["127.0.0.1"], other_test=["127.0.0.1"])
        self.may_answer = asyncio.Event()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if host == "images.test":
            await self.may_answer.wait()
        return await super().__call__(host, port)


async def test_lookups_of_one_tenant_leave_room_for_others(server):
    names = SilentNames()
    fetcher = a_fetcher(server, names, max_fetches=4)
    slow = [RemoteImage(0, server.url("/red.png", "images.test"), FIELD)]

    for _ in range(2):
        with pytest.raises(RequestRejected, match="could not be fetched within"):
            async with fetcher.fetched([b""], slow, tenant="evil", most_bytes=MAX_IMAGE_BYTES, within_seconds=0.01):
                pass
    with pytest.raises(RequestRejected, match="name servers are slow") as refused:
        await fetch(fetcher, server.url("/red.png", "images.test"), tenant="evil")
    others = await fetch(fetcher, server.url("/red.png", "other.test"), tenant="victim")
    names.may_answer.set()
    await turns(3)

    assert refused.value.reason is Reason.QUEUE_FULL
    assert others == (an_image("red"),)
    assert await fetch(fetcher, server.url("/red.png", "images.test"), tenant="evil") == others


async def test_only_the_usual_ports_are_used_without_hosts(server):
    refused = await refusal(a_fetcher(server, hosts=()), server.url("/red.png"))

    assert f"port 80 or 443; images.hosts can name 127.0.0.1:{server.port}" in refused.message


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [("*.test:PORT", True), ("*.ages.test:PORT", False), ("*.images.test:PORT", False), ("test:PORT", False)],
)
async def test_wildcard_names_the_hosts_below(server, entry, allowed):
    fetcher = a_fetcher(server, hosts=(entry.replace("PORT", str(server.port)),))

    if allowed:
        await fetch(fetcher, server.url("/red.png", "images.test"))
    else:
        await refusal(fetcher, server.url("/red.png", "images.test"))


@pytest.mark.parametrize("path", ["/endless", "/stated?bytes=100000"])
async def test_larger_image_than_the_request_may_have_is_cut_off(server, path):
    refused = await refusal(a_fetcher(server), server.url(path), most_bytes=100_000)

    assert "larger than the 100,000 bytes" in refused.message


async def test_images_that_the_client_sent_count_against_the_limit(server):
    given, path = an_image(), "/stated?bytes=1000"
    size = len(given) + 1000

    await fetch(a_fetcher(server), server.url(path), images=[given], most_bytes=len(given) + size)
    await refusal(a_fetcher(server), server.url(path), images=[given], most_bytes=len(given) + size - 1)


@pytest.mark.parametrize("path", ["/silent", "/trickle"])
async def test_slow_server_ends_in_an_error_in_time(server, path):
    refused = await refusal(a_fetcher(server, timeout_seconds=0.3), server.url(path))

    assert "could not be fetched within 0.3 s" in refused.message
    await until(lambda: server.left == 1)


async def test_memory_is_held_until_the_request_ends_and_bounded(server):
    fetcher = a_fetcher(server, max_held_mib=1)
    remote = [RemoteImage(0, server.url("/stated?bytes=700000"), FIELD)]
    options = {"most_bytes": MAX_IMAGE_BYTES, "within_seconds": LONG_SECONDS}

    async with fetcher.fetched([b""], remote, **options):
        with pytest.raises(RequestRejected, match="all memory for fetched images") as refused:
            async with fetcher.fetched([b""], remote, **options):
                pass
    async with fetcher.fetched([b""], remote, **options):
        pass

    assert (refused.value.reason, refused.value.retry_after_ms) == (Reason.QUEUE_FULL, 1000)
    assert fetcher.outcomes[FetchOutcome.BUSY] == 1
    assert fetcher.held_bytes == 0


async def test_running_and_waiting_fetches_are_bounded(server):
    fetcher = a_fetcher(server, max_fetches=2)
    asked = [asyncio.create_task(fetch(fetcher, server.url(f"/silent?{n}"))) for n in range(MAX_WAITING)]
    await until(lambda: server.silent == 2)

    with pytest.raises(RequestRejected, match="wait to be fetched") as refused:
        await fetch(fetcher, server.url("/red.png"))
    for each in asked[:2]:
        each.cancel()
    await until(lambda: server.silent == 4)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)

    assert refused.value.reason is Reason.QUEUE_FULL
    assert fetcher.outcomes[FetchOutcome.CANCELLED] == MAX_WAITING
    assert await fetch(fetcher, server.url("/red.png")) == (an_image("red"),)


async def test_tenant_with_silent_servers_leaves_places_for_others(server):
    fetcher = a_fetcher(server, max_fetches=2)
    asked = [
        asyncio.create_task(fetch(fetcher, server.url(f"/silent?{n}"), tenant="slow")) for n in range(MAX_WAITING // 2)
    ]
    await until(lambda: server.silent == 1)

    with pytest.raises(RequestRejected, match="wait to be fetched"):
        await fetch(fetcher, server.url("/red.png"), tenant="slow")
    assert await fetch(fetcher, server.url("/red.png"), tenant="other") == (an_image("red"),)

    assert server.silent == 1
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert await fetch(fetcher, server.url("/blue"), tenant="slow") == (an_image("blue"),)


async def test_tenant_holds_at_most_half_of_the_memory(server):
    fetcher = a_fetcher(server, max_held_mib=2)
    remote = [RemoteImage(0, server.url("/stated?bytes=700000"), FIELD)]
    options = {"most_bytes": MAX_IMAGE_BYTES, "within_seconds": LONG_SECONDS}

    async with fetcher.fetched([b""], remote, tenant="large", **options):
        with pytest.raises(RequestRejected, match="all memory for fetched images"):
            async with fetcher.fetched([b""], remote, tenant="large", **options):
                pass
        async with fetcher.fetched([b""], remote, tenant="other", **options):
            pass

    assert fetcher.held_bytes == 0


async def test_failed_image_ends_the_others_of_its_request(server):
    fetcher = a_fetcher(server)

    with pytest.raises(RequestRejected, match="status 404"):
        await fetch(fetcher, server.url("/silent"), server.url("/none"))

    await until(lambda: server.left == server.silent)
    assert fetcher.outcomes[FetchOutcome.REFUSED] == fetcher.outcomes[FetchOutcome.CANCELLED] == 1


def server_tls(authority: Authority, **hosts: Any) -> ssl.SSLContext:
    files = authority.issue("images", **hosts)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    return context


async def test_https_image_needs_a_certificate_of_its_name(tmp_path):
    authority = Authority(tmp_path, "authority")
    names = {"images_test": ["127.0.0.1"], "other_test": ["127.0.0.1"]}
    async with an_image_server(server_tls(authority, hosts=["images.test"])) as server:
        trusting = a_fetcher(server, Names(**names), authority=authority.file)

        assert await fetch(trusting, server.url("/red.png", "images.test")) == (an_image("red"),)
        other = a_fetcher(server, Names(**names), authority=authority.file)
        assert "certificate" in (await refusal(other, server.url("/red.png", "other.test"))).message
        assert "certificate" in (await refusal(a_fetcher(server), server.url("/red.png", "images.test"))).message
        down = f"/to?url=http://images.test:{server.port}/red.png"
        down_fetcher = a_fetcher(server, authority=authority.file)
        assert "from https to http" in (await refusal(down_fetcher, server.url(down, "images.test"))).message


def test_authority_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationRefused, match=r"images\.authority"):
        ImageFetcher(ImageSettings(fetch_urls=True, authority=str(tmp_path / "none.pem")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": ("https://example.com",)}, r"hosts\[0\]"),
        ({"hosts": ("example.com", "Example.com")}, r"hosts\[1\]"),
        ({"hosts": ("example.com:0",)}, r"hosts\[0\]"),
        ({"hosts": ("example.com:65536",)}, r"hosts\[0\]"),
        ({"networks": ("10.0.0.1/8",)}, r"networks\[0\]"),
        ({"networks": ("intranet",)}, r"networks\[0\]"),
    ],
)
def test_setting_that_names_no_host_or_network_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ImageSettings(**settings)
