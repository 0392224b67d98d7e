"""Runner of the API server for tests, in a separate thread, so that tests may block (`an_api_server`)."""

import asyncio
import concurrent.futures
import contextlib
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from tests.support.certificates import Authority
from tests.support.kube.api.cluster import ObjectStore
from tests.support.kube.api.http.server import KubeHttpServer
from tests.support.waiting import thread_stacks, turns

STOP_SECONDS = 30
OTHER_SERVER = "FLEET_TEST_KUBE_API"
"""Environment variable with the address of another API server, such as a `kubectl proxy`. If set, tests use that server."""


class RunningApiServer(msgspec.Struct, frozen=True):
    """Represents a running API server: its address, and the operations for tests besides the Kubernetes API."""

    url: str
    authority: str | None = None
    """The file with the certificate of the authority that signed the server's certificate; None without TLS."""

    def kubeconfig(self, folder: Path, *, namespace: str = "default", token: str = "") -> Path:
        """Write a kubeconfig for kubectl, Helm and the clients, and return its path. These programs send a token only over TLS."""
        cluster = {"server": self.url} | ({"certificate-authority": self.authority} if self.authority else {})
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        }
        path = folder / f"kubeconfig-{namespace}-{abs(hash(token))}"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(config))
        return path

    def order_fault(self, kind: str, **conditions: Any) -> int:
        """Order a fault (see `tests.support.kube.api.faults.Fault`), and return the number that removes it."""
        return self._ask("POST", "faults", json={"kind": kind, **conditions})["fault"]

    def remove_fault(self, number: int) -> None:
        self._ask("DELETE", f"faults/{number}")

    def faults(self) -> dict[str, Any]:
        return self._ask("GET", "faults")

    def compact(self) -> None:
        """Let the server forget all changes so far, so that it refuses new watches from earlier revisions."""
        self._ask("POST", "compact")

    def requests(self) -> list[dict[str, Any]]:
        """Return all requests since the start, or since the last `forget_requests`."""
        return self._ask("GET", "requests")

    def forget_requests(self) -> None:
        self._ask("DELETE", "requests")

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        # Without TLS, httpx must not load certificates, because this would take longer than the request.
        verify: Any = ssl.create_default_context(cafile=self.authority) if self.authority else False
        with httpx.Client(base_url=self.url, verify=verify, trust_env=False) as client:
            return client.request(method, f"/fleet-test/{path}", **more).raise_for_status().json()


@contextlib.contextmanager
def an_api_server(
    *,
    with_controllers: bool = False,
    authority: Authority | None = None,
    port: int = 0,
    seed: int = 0,
    beside: Callable[[ObjectStore], Coroutine[Any, Any, None]] | None = None,
) -> Iterator[RunningApiServer]:
    """Run an API server while the context is open. Skip the test if the tests use another server (`OTHER_SERVER`).

    Args:
        with_controllers: Delete objects whose owners are gone, and all objects of deleted namespaces.
        beside: Function whose coroutine runs in the server's event loop on its objects, such as further controllers.
        authority: The authority that signs the server's TLS certificate; None: no TLS.
        seed: The seed of generated names and uids.
    """
    if given := os.environ.get(OTHER_SERVER):
        pytest.skip(f"needs faults, simulated nodes or a state that only the server for tests has, and not {given}")
    loop = asyncio.new_event_loop()
    server = KubeHttpServer(ObjectStore(chance=random.Random(seed)), with_controllers=with_controllers)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1)
    context = None
    if authority is not None:
        issued = authority.issue("api-server")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(issued["certificate"], issued["key"])

    async def start() -> int:
        await runner.setup()
        await web.SockSite(runner, listening, ssl_context=context).start()
        return runner.addresses[0][1]

    async def stop() -> None:
        loop.remove_reader(listening.fileno())
        await turns()  # see `kvstore.net.listeners.stop_listening`
        await runner.cleanup()

    listening = socket.create_server(("127.0.0.1", port))
    # A daemon, because the end of pytest must not wait for a loop that does not stop.
    thread = threading.Thread(target=loop.run_forever, name="api-server", daemon=True)
    thread.start()
    with contextlib.ExitStack() as ending:  # runs every callback, even if one before fails
        ending.callback(_end_loop, loop, thread)
        ending.callback(lambda: asyncio.run_coroutine_threadsafe(stop(), loop).result(STOP_SECONDS))
        if beside is not None:
            ending.callback(_end, asyncio.run_coroutine_threadsafe(beside(server.cluster), loop))
        bound = asyncio.run_coroutine_threadsafe(start(), loop).result(STOP_SECONDS)
        if authority is None:
            yield RunningApiServer(f"http://127.0.0.1:{bound}")
        else:
            yield RunningApiServer(f"https://127.0.0.1:{bound}", authority.file)


def _end(beside: concurrent.futures.Future[None]) -> None:
    beside.cancel()
    with contextlib.suppress(concurrent.futures.CancelledError):
        beside.result(STOP_SECONDS)


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(STOP_SECONDS)
    assert not thread.is_alive(), f"the API server's loop does not stop:\n{thread_stacks()}"
    loop.close()
