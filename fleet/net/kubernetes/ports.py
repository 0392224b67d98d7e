"""What the operator needs of the world: an API server, a wall clock, what routers say, and what clients get."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol

from msgspec import Struct

from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.views import View
from operators.observed.registrations import WorkerRegistration
from operators.probes.evidence import Probe, ProbeCompletion, ProbeFailure

Manifest = dict[str, Any]


class KubernetesError(Exception):
    """The API server did not do what it was asked. What it says is fit for logs and conditions: no value of a specification is in it."""


class ApiServerUnreachable(KubernetesError):
    """Nobody answered, the answer broke off, or the server failed: later, again."""


class ApiServerBusy(KubernetesError):
    """Later, again, and not before it says."""

    def __init__(self, message: str, after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class ObjectConflict(KubernetesError):
    """The object is not any more what the request was made for: look again."""


class NameTaken(ObjectConflict):
    """What was to be made is there already: look at it."""


class ObjectMissing(KubernetesError):
    """There is no such object, or no such kind."""


class VersionExpired(KubernetesError):
    """The server does not remember changes since then: list again."""


class RequestDenied(KubernetesError):
    """It will not be done as long as nobody changes something: a bad field, a quota, a right that is missing."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ObjectList(Struct, Generic[View], frozen=True):
    """All of a kind."""

    items: tuple[View, ...]
    version: str
    """To watch from."""


class WatchEvent(Struct, Generic[View], frozen=True):
    """What a watch says."""

    version: str
    """To go on from when the stream ends."""

    item: View | None = None
    """Nothing in a bookmark."""

    gone: bool = False


class KubernetesApi(Protocol):
    """An API server. Every call has a deadline, and raises nothing but ClusterError."""

    async def served(self) -> OptionalKinds: ...

    async def list(self, kind: ApiKind, of: type[View], namespace: str, selector: str = "") -> ObjectList[View]: ...

    def watch(
        self, kind: ApiKind, of: type[View], namespace: str, version: str, selector: str = ""
    ) -> AsyncGenerator[WatchEvent[View], None]:
        """Changes after a version, until the server ends the stream, which it does now and then."""
        ...

    async def get(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View: ...

    async def find(self, kind: ApiKind, of: type[View], namespace: str, name: str) -> View | None:
        """The newest, with no other right than to list the kind; None: there is none of that name."""
        ...

    async def create(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Taken where the name is not free."""
        ...

    async def make(self, kind: ApiKind, of: type[View], namespace: str, manifest: Manifest) -> View:
        """Server-side apply of what is not there; Taken where the name is not free."""
        ...

    async def replace(self, kind: ApiKind, of: type[View], namespace: str, name: str, manifest: Manifest) -> View: ...

    async def apply(self, kind: ApiKind, of: type[View], manifest: Manifest, part: str = "") -> View:
        """Server-side apply, as the operator; what others say of the same fields gives way. `part`: the status."""
        ...

    async def patch(
        self, kind: ApiKind, of: type[View], namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> View:
        """JSON patch; Stale where a `test` in it fails."""
        ...

    async def delete(self, kind: ApiKind, namespace: str, name: str, uid: str) -> None:
        """Only the object with this uid."""
        ...


class RouterReports(Protocol):
    """What the routers of deployments say of their workers."""

    async def workers(self, address: str, secret: bytes) -> tuple[WorkerRegistration, ...] | None:
        """Return the workers that the router at a host:port gives requests to; None where it does not answer.

        Args:
            address: The router's control port.
            secret: What proves there that the operator may ask; empty: nothing does.
        """
        ...


class ProbeSender(Protocol):
    """One who uses the routers of deployments as everybody does."""

    async def ask(self, probe: Probe) -> ProbeCompletion | ProbeFailure:
        """Send a request for a token. Has a deadline, and raises nothing."""
        ...


class WallClock(Protocol):
    """The time of day."""

    def __call__(self) -> datetime: ...
