"""Ports of the Kubernetes API: the calls that Fleet makes to an API server, and their errors."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol

from msgspec import Struct

from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.views import View

Manifest = dict[str, Any]


class KubernetesError(Exception):
    """The API server did not do what it was asked.

    The message is safe for logs and conditions: it contains no value of a specification.
    """


class ApiServerUnreachable(KubernetesError):
    """The server did not answer, the answer broke off, or the server failed; retry later."""


class ApiServerBusy(KubernetesError):
    """The server is busy (HTTP 429 or 503); retry after the time that it gives."""

    def __init__(self, message: str, after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class ObjectConflict(KubernetesError):
    """The object changed since it was read (HTTP 409). Read it again and retry."""


class NameTaken(ObjectConflict):
    """The object to create exists already. Read it."""


class ObjectMissing(KubernetesError):
    """The object, or its kind, does not exist."""


class VersionExpired(KubernetesError):
    """The server does not remember changes since that version (HTTP 410). List again."""


class RequestDenied(KubernetesError):
    """The server refuses until somebody changes something: a bad field, a quota, a missing right."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ObjectList(Struct, Generic[View], frozen=True):
    """All objects of a kind."""

    items: tuple[View, ...]
    version: str
    """The version from which to watch."""


class WatchEvent(Struct, Generic[View], frozen=True):
    """One event of a watch."""

    version: str
    """The version from which to go on when the stream ends."""

    item: View | None = None
    """None: the event is a bookmark."""

    gone: bool = False


class KubernetesApi(Protocol):
    """An API server. Every call has a deadline, and raises only KubernetesError."""

    async def served(self) -> OptionalKinds: ...

    async def list(self, kind: ApiKind, of: type[View], namespace: str, selector: str = "") -> ObjectList[View]: ...

    def watch(
        self,
        kind: ApiKind,
        of: type[View],
        namespace: str,
        version: str,
        selector: str = "",
        began: Callable[[], None] | None = None,
    ) -> AsyncGenerator[WatchEvent[View], None]:
        """Yield changes after a version, until the server ends the stream, which it does now and then.

        `began` is called when the server has taken the watch, which may be long before the first change.
        """
        ...

    async def get(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View: ...

    async def find(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View | None:
        """Return the newest version, which needs no right but to list the kind; None: no object has that name."""
        ...

    async def create(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Create an object; NameTaken if the name is in use."""
        ...

    async def make(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Create an object by server-side apply; NameTaken if the name is in use."""
        ...

    async def replace(self, kind: ApiKind, of: type[View], namespace: str, name: str, manifest: Manifest) -> View: ...

    async def apply(self, kind: ApiKind, of: type[View], manifest: Manifest, part: str = "") -> View:
        """Apply on the server's side as the operator, which overrides other managers of the same fields.

        `part`: the status.
        """
        ...

    async def patch(
        self, kind: ApiKind, of: type[View], namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> View:
        """Apply a JSON patch; ObjectConflict if a `test` in it fails."""
        ...

    async def delete(self, kind: ApiKind, namespace: str, name: str, uid: str) -> None:
        """Delete the object only if it has this uid."""
        ...


class WallClock(Protocol):
    """The wall clock."""

    def __call__(self) -> datetime: ...
