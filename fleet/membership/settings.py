"""Settings of the registry, and of the supervisor of a local cluster."""

from typing import Annotated

from msgspec import Meta, Struct


class MembershipSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the membership."""

    lease_ms: Annotated[int, Meta(ge=300)] = 9000
    """Lease of a worker after its last registration. A worker registers three times per lease, as is usual for leases
    in etcd and Kubernetes. The router notices a crashed worker sooner, because its stream breaks.
    """

    tick_ms: Annotated[int, Meta(ge=10)] = 250
    """Time between two checks for ended leases."""


Seconds = Annotated[float, Meta(ge=1, le=86_400)]


class SupervisionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for hung and dead processes of `fleet up`.

    Time does not count while a process waited for a core, was traced by a debugger, or while the whole machine stood
    still.
    """

    stopped_seconds: Seconds = 3.0
    """Longest time for which a process may be stopped by a signal before it is killed and restarted.

    It allows tools that stop a process for a moment (such as a memory dump). Several routers may share a port; a
    stopped one keeps its share of new connections for less than 5 s.
    """

    router_silence_seconds: Seconds = 5.0
    """Longest time for which a router's event loop may stand still.

    It normally turns within milliseconds, because long work runs in threads. With the default, a hung router is
    replaced and serves again within 10 s.
    """

    store_silence_seconds: Seconds = 10.0
    """The same for a store node, whose disks and networks are served by threads. While it stands still its clients
    compute.
    """

    worker_silence_seconds: Seconds = 30.0
    """The same for a worker.

    Engines sometimes make long synchronous calls (a grammar, a LoRA adapter, garbage collection), and a worker starts
    slowly. Routers send its requests elsewhere after `router.heartbeat_timeout_seconds`.
    """

    longest_pause_seconds: Seconds = 30.0
    """Longest pause before a process that keeps dying is restarted. The first pause is a quarter of a second; each next
    one is twice as long. Kubernetes' ceiling is ten times higher, because its nodes serve many users.
    """
