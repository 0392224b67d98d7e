"""Discovery settings: define the directories in which routers find workers, and the record of a worker in a directory.

Without a directory, each worker registers with a router (`fleet.v1.Registry`). A directory is useful for several
routers: a worker writes its record into the directory once, and all routers find it, also routers that start later.
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
    """Holds the record of one worker in a directory. Readers ignore unknown fields, which later versions may add."""

    worker_id: Annotated[WorkerId, Meta(min_length=1, max_length=128)]
    incarnation: Annotated[Incarnation, Meta(min_length=1, max_length=128)]
    address: Annotated[str, Meta(min_length=1, max_length=4096)]
    lease_seconds: LeaseSeconds

    @property
    def lease(self) -> Nanos:
        return Nanos(self.lease_seconds * SECOND)


class FileDiscovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """A folder with one file per worker, on one host or on a shared file system."""

    folder: Text
    """The folder. It must exist: otherwise a file system that is not mounted would look like a folder without workers."""

    lease_seconds: LeaseSeconds = 9
    """Time for which a worker's lease lasts after the last renewal of its file; the worker renews it three times in this time."""

    poll_ms: Annotated[int, Meta(ge=10, le=60_000)] = 500
    """Time between two readings of the folder by a router."""


class EtcdDiscovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """One key per worker in etcd (3.4 or later), under a lease. Etcd itself removes the key if the worker does not renew the lease."""

    endpoints: tuple[Text, ...]
    """host:port of one or more etcd members; if a member does not answer, the next member is asked."""

    prefix: Text = "/fleet/workers/"
    """Prefix of the keys. Clusters that share an etcd need different prefixes."""

    credentials: Credentials = Credentials()
    """`authority` verifies etcd's certificate; `certificate` and `key` identify the client if etcd asks for them. Without
    `authority`, connections have no TLS.
    """

    lease_seconds: LeaseSeconds = 9
    """Time for which a worker's lease lasts after its last renewal; the worker renews it three times in this time."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints: name at least one, such as 127.0.0.1:2379")
        for endpoint in self.endpoints:
            try:
                host_port(endpoint)
            except ValueError as error:
                raise ValueError(f"endpoints: {error}") from error
        if self.credentials.certificate and not self.credentials.authority:
            raise ValueError("credentials.authority: is needed to verify etcd's certificate")
        if self.credentials.secret_file or self.credentials.insecure:
            raise ValueError("credentials: etcd uses authority, certificate and key only")


class KubernetesDiscovery(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kubernetes"
):
    """One Lease (coordination.k8s.io) per worker.

    Workers need the verbs get, create, update and delete on leases; routers need list, watch and delete. With
    `service`, workers also need create, patch and delete on endpointslices. Routers delete Leases that nobody renewed
    in time. Without the verb delete, such Leases stay until their pods are removed.
    """

    cluster: LabelValue
    """Value of the label app.kubernetes.io/instance; it separates the workers of clusters in one namespace."""

    namespace: str = ""
    """Namespace of the leases; empty: the namespace of the pod."""

    kubeconfig: str = ""
    """Kubeconfig file for the API server; empty: the service account of the pod."""

    lease_seconds: LeaseSeconds = 30
    """Time for which a worker's lease lasts after its last renewal; the worker renews it three times in this time.

    With the default, a worker renews its Lease only every ten seconds, like a Kubernetes node, because every write loads the
    API server. A router notices a crashed worker before the lease ends, because the stream to the worker breaks.
    """

    labels: dict[str, str] = {}
    """Worker only: further labels for its Lease."""

    service: str = ""
    """Worker only: name of a Service without a selector, for which the worker keeps an EndpointSlice; empty: none.

    The EndpointSlice belongs to the worker's Lease and is removed with it.
    """

    pod: str = ""
    """Worker only: name of the pod that owns the worker's Lease, so that the Lease is removed with the pod.

    Empty: the pod to which the service account's token belongs. Outside of a pod, the Lease then has no owner.
    """

    pod_uid: str = ""
    """Worker only: uid of the pod that `pod` names."""

    def __post_init__(self) -> None:
        if bool(self.pod) != bool(self.pod_uid):
            raise ValueError("pod and pod_uid: set both or neither")


Discovery = FileDiscovery | EtcdDiscovery | KubernetesDiscovery
