"""Where plans go."""

from typing import Annotated

from msgspec import Meta, Struct

from kvstore.net.addresses import host_port
from kvstore.security.credentials import Credentials

Text = Annotated[str, Meta(min_length=1)]


class FolderTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """A folder in which an orchestrator reads plans and says what there is: `fleet up`, or one of your own."""

    folder: Text


class EtcdTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """Two keys in etcd, by which an orchestrator of your own does the same."""

    endpoints: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """host:port of one or several members of the etcd cluster; the next one is asked when one does not answer."""

    prefix: Text = "/fleet/scaling/"
    """Of the keys `plan` and `report`."""

    credentials: Credentials = Credentials()
    """`authority` signs etcd's certificate; `certificate` and `key` are shown to an etcd that asks. Without any: no TLS."""

    def __post_init__(self) -> None:
        for endpoint in self.endpoints:
            try:
                host_port(endpoint)
            except ValueError as error:
                raise ValueError(f"endpoints: {error}") from error


class KubernetesTarget(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kubernetes"
):
    """The RoleScalers of a DisaggDeployment. Needs the verbs get on disaggdeployments, list and patch on rolescalers."""

    deployment: Text
    namespace: Text = "default"
    kubeconfig: str = ""
    """File that says how to reach the API; empty: as a pod does, by its service account."""


Target = FolderTarget | EtcdTarget | KubernetesTarget


class PlanConnectorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that says where plans go."""

    connector: Target
