"""Where workers can be found besides the registries of the routers: settings, and the record that is kept there of each worker.

Without any of it, workers register with a router (`fleet.v1.Registry`), which needs nothing else to run. A directory is for several
routers that come and go: a worker is published once, all routers find it, and so does one that has just started.
"""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation, WorkerId
from kvstore.net.addresses import host_port
from kvstore.security.credentials import Credentials

Text = Annotated[str, Meta(min_length=1)]
LabelValue = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
LeaseSeconds = Annotated[int, Meta(ge=2, le=3600)]


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """One worker, as it is written down. Fields that a later version adds are passed over."""

    worker_id: Annotated[WorkerId, Meta(min_length=1, max_length=128)]
    incarnation: Annotated[Incarnation, Meta(min_length=1, max_length=128)]
    address: Annotated[str, Meta(min_length=1, max_length=4096)]
    lease_seconds: LeaseSeconds

    @property
    def lease(self) -> Nanos:
        return Nanos(self.lease_seconds * SECOND)


class FileDiscovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """A folder with a file for each worker: on one host, or on a file system that all hosts share."""

    folder: Text
    """Has to be there: a file system that is not mounted must not look like a folder without workers."""

    lease_seconds: LeaseSeconds = 9
    """How long a worker is a member after its file was last renewed, which it does three times within that."""

    poll_ms: Annotated[int, Meta(ge=10, le=60_000)] = 500
    """How often a router reads the folder."""


class EtcdDiscovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """A key for each worker in etcd (3.4 or later), under a lease that etcd itself ends."""

    endpoints: tuple[Text, ...]
    """host:port of one or several members of the etcd cluster; the next one is asked when one does not answer."""

    prefix: Text = "/fleet/workers/"
    """Of the keys. Clusters that share an etcd differ in it."""

    credentials: Credentials = Credentials()
    """`authority` signs etcd's certificate; `certificate` and `key` are shown to an etcd that asks. Without any: no TLS."""

    lease_seconds: LeaseSeconds = 9
    """How long a worker is a member after it last renewed its lease, which it does three times within that."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints: name at least one, as in 127.0.0.1:2379")
        for endpoint in self.endpoints:
            try:
                host_port(endpoint)
            except ValueError as error:
                raise ValueError(f"endpoints: {error}") from error
        if self.credentials.certificate and not self.credentials.authority:
            raise ValueError("credentials.authority: is needed to know etcd's certificate")
        if self.credentials.secret_file or self.credentials.insecure:
            raise ValueError("credentials: etcd knows authority, certificate and key only")


class KubernetesDiscovery(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kubernetes"
):
    """A Lease (coordination.k8s.io) for each worker.

    Workers need the verbs get, create, update and delete on leases there, routers list, watch and delete; with `service`, workers also
    create, patch and delete on endpointslices. Routers delete Leases that nobody has renewed in time; without the verb, these stay
    until their pods go.
    """

    cluster: LabelValue
    """Tells the workers of one cluster from others in the namespace: the value of the label app.kubernetes.io/instance."""

    namespace: str = ""
    """Where the leases are; empty: the namespace of the pod."""

    kubeconfig: str = ""
    """File that says how to reach the API; empty: as a pod does, by its service account."""

    lease_seconds: LeaseSeconds = 30
    """How long a worker is a member after it last renewed its lease, which it does three times within that: every write goes to the
    API server, where nodes, for comparison, renew theirs every ten seconds. A worker that crashes is noticed sooner, by its
    stream."""

    labels: dict[str, str] = {}
    """Of a worker: more labels for its Lease."""

    service: str = ""
    """Of a worker: name of a Service without a selector for which the worker keeps an EndpointSlice; empty: none. It belongs to the
    worker's Lease, and goes with it."""

    pod: str = ""
    """Of a worker: name of its pod, which owns the worker's Lease, so that this goes when the pod goes. Empty: the one that the service
    account's token was made for, if this is a pod."""

    pod_uid: str = ""
    """Of a worker: that pod's uid."""

    def __post_init__(self) -> None:
        if bool(self.pod) != bool(self.pod_uid):
            raise ValueError("pod and pod_uid: an owner is named by both, or by neither")


Discovery = FileDiscovery | EtcdDiscovery | KubernetesDiscovery
