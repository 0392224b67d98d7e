"""Digests of base images: looked up at their registry by the distribution API of OCI, without a container runtime.

A registry that asks for a token gets the request for an anonymous one. Answers 429 and 5xx, broken connections and silence are tried
again until the deadline. The API: https://github.com/opencontainers/distribution-spec/blob/main/spec.md
"""

import hashlib
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from email.message import Message
from typing import NamedTuple

DOCKER_HUB = "registry-1.docker.io"
ACCEPTED = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
"""Indexes first: their digest stands for the image on all architectures, as the one that container runtimes keep."""

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
AGAIN = frozenset({408, 429, 500, 502, 503, 504})
SECONDS_PER_ANSWER = 10.0
LONGEST_PAUSE = 30.0
MOST_BYTES = 4_000_000
"""The largest manifest that registries have to take, and the largest answer that is read."""


class LookupFailed(Exception):
    """The digest could not be looked up. The message says why."""


class ImageName(NamedTuple):
    registry: str
    repository: str
    tag: str


class _Answer(NamedTuple):
    status: int
    headers: Message
    content: bytes


def parse(name: str) -> ImageName:
    """Split the name of an image as container runtimes do: `python:3.11` is `docker.io/library/python:3.11`."""
    plain = name.partition("@")[0]
    path, _, tag = plain.rpartition(":") if ":" in plain.rpartition("/")[2] else (plain, "", "latest")
    registry, _, repository = path.partition("/")
    if not repository or not (registry == "localhost" or "." in registry or ":" in registry):
        registry, repository = "docker.io", path
    if registry in {"docker.io", "index.docker.io", DOCKER_HUB}:
        registry, repository = DOCKER_HUB, repository if "/" in repository else f"library/{repository}"
    return ImageName(registry, repository, tag)


def digest_among(references: Iterable[str], base: str) -> str:
    """Return the digest of an image from the references `REPOSITORY@DIGEST` of a container runtime; empty: none is of its repository."""
    wanted = parse(base)
    for each in references:
        name, _, digest = each.partition("@")
        if parse(name)[:2] == wanted[:2] and DIGEST.fullmatch(digest):
            return digest
    return ""


def look_up(base: str, *, mirror: str = "", seconds: float = 60.0) -> str:
    """Return the digest of an image.

    Args:
        base: The image, such as `python:3.11-slim-bookworm`.
        mirror: URL of a registry that is asked in place of the image's own, such as `https://mirror.gcr.io`.
        seconds: Time limit of the lookup with all of its tries.

    Raises:
        LookupFailed: The registry has no such image, wants credentials, or gave no usable answer in time.
    """
    registry, repository, tag = parse(base)
    root = mirror.rstrip("/") or f"https://{registry}"
    url = f"{root}/v2/{repository}/manifests/{urllib.parse.quote(tag)}"
    deadline = time.monotonic() + seconds
    headers = {"Accept": ACCEPTED}
    answer = _ask("HEAD", url, headers, deadline)
    if answer.status == 401 and (token := _token(answer.headers.get("WWW-Authenticate", ""), repository, deadline)):
        headers["Authorization"] = f"Bearer {token}"
        answer = _ask("HEAD", url, headers, deadline)
    digest = answer.headers.get("Docker-Content-Digest") or ""
    if answer.status == 200 and not digest:  # the header is not a duty
        answer = _ask("GET", url, headers, deadline)
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if answer.status != 200:
        raise LookupFailed(f"{url}: the registry answers {answer.status}{_why(answer.status)}")
    if not DIGEST.fullmatch(digest):
        raise LookupFailed(f"{url}: {digest[:100]!r} is not a digest")
    return digest


def _why(status: int) -> str:
    if status in {401, 403}:
        return ": it wants credentials; write the digest into the lock by hand"
    return ": it has no such image" if status == 404 else ""


def _token(challenge: str, repository: str, deadline: float) -> str:
    """Return an anonymous token for a challenge `Bearer realm="…",service="…",scope="…"`; empty: it is not one."""
    scheme, _, rest = challenge.partition(" ")
    asked = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    realm = asked.pop("realm", "")
    if scheme.lower() != "bearer" or urllib.parse.urlsplit(realm).scheme not in {"http", "https"}:
        return ""
    query = {key: asked[key] for key in ("service", "scope") if key in asked}
    url = f"{realm}?{urllib.parse.urlencode({'scope': f'repository:{repository}:pull'} | query)}"
    answer = _ask("GET", url, {}, deadline)
    if answer.status != 200:
        raise LookupFailed(f"{realm}: the registry's token service answers {answer.status}{_why(answer.status)}")
    try:
        said = json.loads(answer.content)
    except ValueError:
        said = None
    found = (said.get("token") or said.get("access_token")) if isinstance(said, dict) else None
    if not isinstance(found, str):
        raise LookupFailed(f"{realm}: the registry's token service answers without a token")
    return found


def _ask(method: str, url: str, headers: Mapping[str, str], deadline: float) -> _Answer:
    """Send a request, again after a while if another try may help, until there is an answer or the deadline passes."""
    pause, why = 0.5, ""
    while (left := deadline - time.monotonic()) > 0:
        request = urllib.request.Request(url, method=method, headers=dict(headers))
        waits = pause
        try:
            with urllib.request.urlopen(request, timeout=min(left, SECONDS_PER_ANSWER)) as answer:
                return _Answer(answer.status, answer.headers, answer.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            if error.code not in AGAIN:
                return _Answer(error.code, error.headers, b"")
            why, waits = f"it answers {error.code}", max(pause, _retry_after(error.headers))
        except (OSError, ValueError) as error:  # refused, reset, silent, no certificate, or no HTTP
            why = str(getattr(error, "reason", error)) or type(error).__name__
        time.sleep(max(0.0, min(waits, LONGEST_PAUSE, deadline - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise LookupFailed(f"{url}: no answer within the time limit ({why or 'no time was left'})")


def _retry_after(headers: Message) -> float:
    """Return the seconds that a registry asks its client to wait; a date instead of a number is passed over."""
    said = headers.get("Retry-After") or ""
    return float(said) if said.isdigit() else 0.0
