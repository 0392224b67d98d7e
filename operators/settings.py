"""Settings of an operator process, field by field; `fleet.config` loads them."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from fleet.net.kubernetes.leader import LeaseSettings
from kvstore.security.metrics_access import MetricsAccess, MetricsTls
from operators.manifests.pods import Images
from operators.rbac import OWN_SECRET

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class ProbeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of probes: requests for one or two tokens, or for one vector, that show whether a deployment serves.

    The operator probes a deployment when its pods are not the pods that answered the last probes.
    """

    enabled: bool = True
    """Send probes. If off, a deployment is Ready when its pods are ready and its routers know its workers."""

    deadline_seconds: Annotated[float, Meta(gt=0, le=600)] = 20.0
    """The time limit for one probe, from the look-up of the Service's name to the last byte. If the routers require a key,
    the limit includes the second request, which has the key."""

    longest_pause_seconds: Seconds = 30.0
    """The longest pause between two requests to a deployment that does not answer; the first pause is half a second, and
    each further pause is twice the previous one."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """Maximum number of concurrent requests to all deployments together."""

    keys: Mapping[str, str] = {}
    """API keys for probes, by `namespace/name` of the deployment whose routers require a key. Each key is sent only to the
    routers of its deployment, and only if `insecure` allows it. Keys are never logged or stored."""

    insecure: bool = False
    """Send `keys` unencrypted to the routers' pods. Use it only on a network that nobody else can read. If off, no key is
    sent, and the condition Ready of a deployment whose routers require a key names this setting."""


class OperatorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one operator process."""

    images: Images
    """Images of routers and workers. A DisaggDeployment may name another image for its workers."""

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """Name of this operator, which no other operator with the same Lease may have; usually the name of the pod."""

    namespaces: tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...] = ()
    """The namespaces whose DisaggDeployments the operator manages; empty: all namespaces."""

    lease: LeaseSettings = LeaseSettings()
    """The Lease that elects the one operator that acts. The other operators wait until this Lease ends."""

    listen: str = "0.0.0.0:8080"
    """Address of the port with /healthz, /readyz and /metrics, as host:port."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Rules that say who may read /metrics."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS of `listen`, also for /healthz and /readyz. `client_authority` must stay empty, because the probes that Kubernetes
    sends to this port have no certificate."""

    kubeconfig: str = ""
    """A file that says how to reach the API server; empty: the pod's service account."""

    control_secret: Annotated[str, Meta(max_length=253)] = OWN_SECRET
    """The Secret in the operator's own namespace (`lease.namespace`) from which the control secrets of all
    deployments are derived. Callers of the routers' control ports, such as workers and the operator, have to prove that
    they know the control secret of the deployment. The operator creates the Secret if it is missing. Empty: control ports
    demand no proof, and only the deployments' NetworkPolicies restrict access."""

    ask_routers: bool = True
    """Ask every router which workers it knows. If off, only the workers' Leases show which workers are registered."""

    ask_routers_seconds: Seconds = 5.0
    """The time between two polls of the routers while their deployment is not Ready. Routers of a Ready deployment are polled
    six times less often."""

    probe: ProbeSettings = ProbeSettings()
    """Settings of the requests that show whether a deployment serves."""

    plans_obeyed: bool = False
    """On if a planner runs (`fleet serve kube-planner`), which writes the statuses of ServingPlans. If off, the
    operator writes these statuses, which then say that no planner obeys the plans."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """Maximum number of deployments that are reconciled at the same time."""

    resync_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """The time between two resyncs, at which all objects are applied again even if nothing has changed. A resync also restores child
    objects that somebody has edited."""

    most_objects: Annotated[int, Meta(ge=1)] = 10_000
    """Maximum number of DisaggDeployments and other custom objects in the work queue. Objects beyond this number are
    enqueued later, when the queue has room again."""

    def __post_init__(self) -> None:
        if self.metrics_tls.client_authority:
            raise ValueError(
                "metrics_tls.client_authority: probes of Kubernetes at this port have no certificate; leave it out"
            )
