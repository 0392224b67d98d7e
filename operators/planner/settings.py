"""Settings of the planner of a cluster (`fleet serve kube-planner`)."""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.net.kubernetes.leader import LeaseSettings
from fleet.planner.settings import RehearsalSettings
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess, MetricsTls
from operators.rbac import OWN_SECRET

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class PlannerLeaseSettings(LeaseSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the Lease that elects the acting planner. The operator must use another Lease."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet-planner"
    """The name of the Lease."""


class KubePlannerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one planner process of a cluster. Goals, budgets and modes are in ServingPlans."""

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """Name of this planner, which no other planner with the same Lease may have; usually the name of the pod."""

    namespaces: tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...] = ()
    """The namespaces whose ServingPlans are obeyed; empty: all namespaces."""

    lease: PlannerLeaseSettings = PlannerLeaseSettings()
    """The Lease that elects the planner process that applies plans and writes statuses. The other planner processes make
    decisions too, so that one of them can continue at once if the elected process ends."""

    listen: str = "0.0.0.0:8080"
    """Address of the port with /healthz, /readyz and /metrics, as host:port."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Rules that say who may read /metrics."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS of `listen`, also for /healthz and /readyz. `client_authority` must stay empty, because the probes that Kubernetes
    sends to this port have no certificate."""

    control_listen: str = ""
    """Address of the control port for `fleet plan`: host:port, or unix:/path; empty: a socket of this user on this machine."""

    control_credentials: Credentials = Credentials()
    """Credentials that callers must prove at a control port over TCP."""

    kubeconfig: str = ""
    """A file that says how to reach the API server; empty: the pod's service account."""

    control_secret: Annotated[str, Meta(max_length=253)] = OWN_SECRET
    """The operator's Secret, from which the control secrets of all deployments are derived. The planner proves to routers
    that it knows the control secret of their deployment. Empty: control ports of deployments demand no proof."""

    control_secret_namespace: Annotated[str, Meta(max_length=63)] = ""
    """Namespace of the Secret in `control_secret`; empty: the namespace of the Lease."""

    stale_seconds: Seconds = 5.0
    """Maximum time between two reports of a router. If a router is silent for longer, the demand is incomplete, and the
    planner of the deployment changes no number of replicas."""

    status_seconds: Seconds = 60.0
    """Minimum time between two writes of a ServingPlan's status in which only numbers have changed, such as numbers
    in messages. Changes of state are written at once."""

    rehearsal: RehearsalSettings = RehearsalSettings()
    """Settings of the rehearsal of plans in the simulator."""

    score_seconds: Seconds = 60.0
    """Length of the period after a plan in which the predicted latencies are compared with the measured ones."""

    most_plans: Annotated[int, Meta(ge=1, le=10_000)] = 200
    """Maximum number of ServingPlans that this process obeys. If more plans can be carried out, the first ones by
    namespace and name are obeyed, and the statuses of the other plans say that they are not."""

    def __post_init__(self) -> None:
        if self.metrics_tls.client_authority:
            raise ValueError(
                "metrics_tls.client_authority: probes of Kubernetes at this port have no certificate; leave it out"
            )
        proof = self.control_credentials
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        if self.control_listen and not unix_path(self.control_listen) and not asks:
            raise ValueError(
                f"control_listen: whoever reaches {self.control_listen} could read the plans: set control_credentials.secret_file, or"
                " certificate, key and authority, or listen at unix:/path"
            )
