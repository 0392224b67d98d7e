"""Fake Hugging Face Hub on loopback for the official client: it has repositories, commits, files in git and LFS, and tokens."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

HOLD_SECONDS = 60


class HubRepository:
    """Serves the files of a folder as a repository with one branch."""

    def __init__(self, folder: Path, **others: bytes) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | others
        self.gated = ""
        """Token that may read the repository; empty if everybody may."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode(), usedforsecurity=False).hexdigest()

    def entry(self, name: str) -> dict:
        content = self.files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        entry = {"oid": oid, "size": len(content)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def etag(self, name: str) -> str:
        entry = self.entry(name)
        return entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]


class FakeHub:
    """Holds the hub's repositories, the requests that it got, and its faults."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepository] = {}
        self.token = ""
        """The only valid token; requests with another one are rejected."""

        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""

        self.authorised: list[str] = []
        """Values of the header Authorization of all requests."""

        self.failing = 0
        """Number of further requests that the hub answers with 503."""

        self.held = ""
        """Name of a file whose second half the hub holds back until `go_on` is called; empty: none."""

        self.holding = threading.Event()
        self.going_on = threading.Event()
        self.sizes: dict[str, int] = {}
        """File sizes that the hub reports instead of the real ones."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_HubHandler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def sent(self, name: str) -> int:
        """Return how many times a file was requested as a whole."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.asked)

    def go_on(self) -> None:
        self.held = ""
        self.going_on.set()

    def close(self) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HubHandler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self) -> None:
        hub, split = self.hub, urlsplit(self.path)
        hub.asked.append((self.command, split.path))
        authorised = self.headers.get("Authorization", "")
        if authorised:
            hub.authorised.append(authorised)
        if hub.failing:
            hub.failing -= 1
            return self._refuse(503, "", "busy")
        if authorised and authorised != f"Bearer {hub.token}":
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", split.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", split.path)
        found = api or file
        repo = hub.repos.get(found[1]) if found else None
        if repo is None:
            return self._refuse(401, "RepoNotFound", "Repository not found")
        revision = api[3] if api else file[2]
        if revision not in (None, "main", repo.commit):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if file:
            return self._file(repo, file[3], authorised)
        if api[2] == "tree":
            tree = [{"type": "file", "path": name} | repo.entry(name) for name in repo.files]
            return self._json(tree)
        info = {"id": found[1], "modelId": found[1], "sha": repo.commit, "private": False, "tags": [], "downloads": 0}
        info["siblings"] = [{"rfilename": name} for name in repo.files]
        if parse_qs(split.query).get("blobs"):
            for each in info["siblings"]:
                entry = repo.entry(each["rfilename"])
                each |= {"blobId": entry["oid"], "size": hub.sizes.get(each["rfilename"], entry["size"])}
                if "lfs" in entry:
                    each["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130}
        return self._json(info)

    def _file(self, repo: HubRepository, name: str, authorised: str) -> None:
        if repo.gated and authorised != f"Bearer {repo.gated}":
            return self._refuse(403 if authorised else 401, "GatedRepo", "Access to this model is restricted")
        if name not in repo.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content = repo.files[name]
        first = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{repo.etag(name)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.end_headers()
        if self.command == "HEAD":
            return None
        half = (first + len(content)) // 2
        self.wfile.write(content[first:half])
        self.wfile.flush()
        if self.hub.held == name:
            self.hub.holding.set()
            self.hub.going_on.wait(HOLD_SECONDS)
        try:
            self.wfile.write(content[half:])
        except OSError:
            self.close_connection = True
        return None

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str) -> None:
        content = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def a_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()
