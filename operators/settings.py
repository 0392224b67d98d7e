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
    """Settings of probes: requests for one token that show whether a deployment serves.

    A deployment gets probes when its pods are not the ones that answered the last probes.
    """

    enabled: bool = True
    """If off, a deployment is Ready when its pods are ready and its routers know them."""

    deadline_seconds: Annotated[float, Meta(gt=0, le=600)] = 20.0
    """The limit for one request, from the look-up of the Service's name to the last byte."""

    longest_pause_seconds: Seconds = 30.0
    """The longest pause between two requests to a deployment that does not answer; the first pause is half a second, and
    each is twice the previous one."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """The most concurrent requests to all deployments together."""

    keys: Mapping[str, str] = {}
    """API keys by `namespace/name` of the deployment whose routers require one. Each key is sent to these routers only,
    and only if `insecure` allows it, and never written down."""

    insecure: bool = False
    """Send `keys` in the clear to the routers' pods, on a network that nobody else is on. If off, no key is sent, and the
    condition Ready of a deployment whose routers require one names this setting."""


class OperatorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one operator process."""

    images: Images
    """Images for deployments that name none."""

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """Name of this operator, which no other operator with the same Lease may have; usually the name of the pod."""

    namespaces: tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...] = ()
    """The namespaces whose DisaggDeployments the operator manages; empty: all namespaces."""

    lease: LeaseSettings = LeaseSettings()
    """The Lease that elects the operator that acts; the others wait for its end."""

    listen: str = "0.0.0.0:8080"
    """host:port of /healthz, /readyz and /metrics."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Access to /metrics."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS of `listen`, also for /healthz and /readyz. Without `client_authority`, because probes of Kubernetes have no certificate."""

    kubeconfig: str = ""
    """A file that says how to reach the API server; empty: the pod's service account."""

    control_secret: Annotated[str, Meta(max_length=253)] = OWN_SECRET
    """The Secret in the operator's own namespace (`lease.namespace`) from which the control secrets of all
    deployments are derived. Callers of the routers' control ports, such as workers and the operator, have to prove
    these control secrets. The operator creates the Secret if it is missing. Empty: control ports of deployments
    demand nothing, and only their NetworkPolicies restrict access."""

    ask_routers: bool = True
    """Ask every router which workers it knows. If off, only the workers' Leases show which workers are registered."""

    ask_routers_seconds: Seconds = 5.0
    """The time between two polls while a deployment is not Ready; six times as long when it is."""

    probe: ProbeSettings = ProbeSettings()
    """The requests that show whether a deployment serves."""

    plans_obeyed: bool = False
    """On if a planner runs (`fleet serve kube-planner`), which writes the statuses of ServingPlans. If off, the
    operator writes these statuses, which then say that no planner obeys the plans."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """Deployments that are reconciled at the same time."""

    resync_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """The time after which all objects are reconciled again even if nothing has changed. This also restores child
    objects that somebody has edited."""

    most_objects: Annotated[int, Meta(ge=1)] = 10_000
    """Maximum number of DisaggDeployments and other custom objects that wait for a reconcile at a time. If there are
    more, the rest waits until there is room in the queue."""

    def __post_init__(self) -> None:
        if self.metrics_tls.client_authority:
            raise ValueError(
                "metrics_tls.client_authority: probes of Kubernetes at this port have no certificate; leave it out"
            )
