"""Ports of the Kubernetes API: the calls that Fleet makes to an API server, and their errors."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol

from msgspec import Struct

from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.views import View

Manifest = dict[str, Any]


class KubernetesError(Exception):
    """A call to the API server failed.

    The message may be shown in logs and conditions: it contains no value of a specification.
    """


class ApiServerUnreachable(KubernetesError):
    """The server did not answer, the answer broke off, or the server failed; retry later."""


class ApiServerBusy(KubernetesError):
    """The server is busy (HTTP 429, or 503 with Retry-After). Retry after `after_seconds`; None: the server states no time."""

    def __init__(self, message: str, after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class ObjectConflict(KubernetesError):
    """The object changed since it was read (HTTP 409). Read it again and retry."""


class NameTaken(ObjectConflict):
    """An object with this name exists already. Read that object."""


class ObjectMissing(KubernetesError):
    """The object, or its kind, does not exist."""


class VersionExpired(KubernetesError):
    """The server does not remember the changes since the version from which a watch should continue (HTTP 410). List again."""


class RequestDenied(KubernetesError):
    """The server refuses the call until somebody changes the cause: a bad field, a quota or a missing right."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ObjectList(Struct, Generic[View], frozen=True):
    """The answer to a list call: all objects of a kind, and the version for a watch."""

    items: tuple[View, ...]
    version: str
    """The version from which a watch continues after this list."""


class WatchEvent(Struct, Generic[View], frozen=True):
    """One event of a watch; `gone` is True if it reports the deletion of `item`."""

    version: str
    """The version from which the next watch continues after the stream has ended."""

    item: View | None = None
    """The changed object; None: the event is a bookmark, which contains only a newer version for the next watch."""

    gone: bool = False


class KubernetesApi(Protocol):
    """Port to one API server. Every call has a deadline, and raises only KubernetesError."""

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
        """Yield the changes after a version, until the server ends the stream, which it does regularly.

        `began` is called when the server has accepted the watch, which may be long before the first change.
        """
        ...

    async def get(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View: ...

    async def find(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View | None:
        """Return the newest version of an object; None: no object has this name. Only the right to list is needed."""
        ...

    async def create(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Create an object; raise NameTaken if the name is in use."""
        ...

    async def make(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Create an object by server-side apply; raise NameTaken if the name is in use."""
        ...

    async def replace(self, kind: ApiKind, of: type[View], namespace: str, name: str, manifest: Manifest) -> View: ...

    async def apply(self, kind: ApiKind, of: type[View], manifest: Manifest, part: str = "") -> View:
        """Apply a manifest by server-side apply. The fields of the client's field manager override those of other managers.

        `part` is `status` to apply the status instead of the object.
        """
        ...

    async def patch(
        self, kind: ApiKind, of: type[View], namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> View:
        """Apply a JSON patch; raise ObjectConflict if a `test` in it fails."""
        ...

    async def delete(self, kind: ApiKind, namespace: str, name: str, uid: str) -> None:
        """Delete an object; raise ObjectConflict if it has another uid than `uid`."""
        ...


class WallClock(Protocol):
    """Function that returns the calendar time with its time zone."""

    def __call__(self) -> datetime: ...
