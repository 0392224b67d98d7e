"""Settings of the registry, and of the supervisor of a local cluster."""

from typing import Annotated

from msgspec import Meta, Struct


class MembershipSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the membership."""

    lease_ms: Annotated[int, Meta(ge=300)] = 9000
    """How long a worker is a member after it last registered; it registers three times within that, as leases in
    etcd and Kubernetes are renewed. A worker that crashes is noticed sooner, by its stream."""

    tick_ms: Annotated[int, Meta(ge=10)] = 250
    """How often ended leases are looked for."""


Seconds = Annotated[float, Meta(ge=1, le=86_400)]


class SupervisionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a process of `fleet up` counts as hung, and how soon one that died is started again.

    Time in which a process waited for a core, was traced by a debugger, or in which the whole machine stood still does not count.
    """

    stopped_seconds: Seconds = 3.0
    """The time for which a process may be stopped by a signal before it is killed and started again. Long enough for tools that stop a process
    for a moment (a memory dump takes less), short enough that of several routers behind one port none keeps its share of new
    connections for 5 s."""

    router_silence_seconds: Seconds = 5.0
    """The time for which a router's event loop may stand still. It turns within milliseconds: whatever takes long is done in threads. With this a
    router that hangs is replaced, and serves, within 10 s."""

    store_silence_seconds: Seconds = 10.0
    """The same of a store node, whose disks and networks are served by threads; while it stands still its clients compute."""

    worker_silence_seconds: Seconds = 30.0
    """The same of a worker. Engines make long synchronous calls now and then (a grammar, an adapter, a collection of garbage), and a
    worker is slow to start; routers send its requests elsewhere after `router.heartbeat_timeout_seconds`."""

    longest_pause_seconds: Seconds = 30.0
    """The ceiling of the pause before a process that keeps dying is started again; pauses begin with a quarter of a second and double.
    A tenth of Kubernetes' ceiling, since nobody else shares the machine's patience."""
