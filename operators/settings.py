"""What an operator process is told, field by field; `fleet.config` loads it and nothing else defines it."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from operators.manifests.pods import Images
from operators.rbac import OWN_SECRET

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class LeaseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the Lease by which one of several operators acts. The times are those that Kubernetes' own controllers have."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet-operator"

    namespace: str = ""
    """Where the Lease is; empty: the namespace of the pod."""

    owner: Annotated[str, Meta(max_length=253)] = ""
    """The Deployment in that namespace which the operator's pods belong to: the Lease goes when it goes. Empty: it stays."""

    duration_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15
    """How long the others wait for a leader that renews no more."""

    renew_within_seconds: Seconds = 10.0
    """A leader that could not renew for so long stops acting."""

    retry_seconds: Seconds = 2.0
    """Between two renewals, and two looks of those who wait."""

    def __post_init__(self) -> None:
        if not self.retry_seconds < self.renew_within_seconds < self.duration_seconds:
            raise ValueError(
                "retry_seconds: has to be shorter than renew_within_seconds, and that than duration_seconds"
            )


class ProbeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the requests that show whether a deployment serves: for a token, when its pods are others than those that answered last."""

    enabled: bool = True
    """Off: a deployment is Ready when its pods are, and its routers know them."""

    deadline_seconds: Annotated[float, Meta(gt=0, le=600)] = 20.0
    """Of one request, from the name of the Service to the last byte."""

    longest_pause_seconds: Seconds = 30.0
    """Between two requests to a deployment that does not answer them; the first pause is half a second, and each is twice the one before."""

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """Requests on their way, to all deployments together."""

    keys: Mapping[str, str] = {}
    """API keys, by `namespace/name` of the deployment whose routers want one. Each is sent to these routers only, and written nowhere."""


class OperatorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one operator process."""

    images: Images
    """Of pods whose DisaggDeployment names none."""

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """Unique among the operators that share a Lease: the pod's name."""

    namespaces: tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...] = ()
    """Whose DisaggDeployments are looked after; empty: those of all namespaces."""

    lease: LeaseSettings = LeaseSettings()

    listen: str = "0.0.0.0:8080"
    """host:port of /healthz, /readyz and /metrics."""

    kubeconfig: str = ""
    """File that says how to reach the API; empty: as a pod does, by its service account."""

    control_secret: Annotated[str, Meta(max_length=253)] = OWN_SECRET
    """Secret in the operator's own namespace (`lease.namespace`) from which the control secrets of all deployments follow: routers ask
    for them at their control ports, workers and the operator prove them. The operator makes it where it is missing. Empty: control ports
    of deployments ask for nothing, and only their NetworkPolicies say who gets there."""

    ask_routers: bool = True
    """Ask every router which workers it knows. Off: only Leases of workers say it."""

    ask_routers_seconds: Seconds = 5.0
    """How often, while something of a deployment is not as it should be; six times as rarely when all is."""

    probe: ProbeSettings = ProbeSettings()

    at_once: Annotated[int, Meta(ge=1, le=64)] = 8
    """Deployments that are worked on at the same time."""

    resync_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """How often everything is looked at though nothing has changed; what somebody edited in a child is put back then."""

    most_objects: Annotated[int, Meta(ge=1)] = 10_000
    """DisaggDeployments and other objects of ours that wait to be looked at. With more, they take turns."""
