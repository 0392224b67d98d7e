"""Settings of connectors: where plans are written."""

from typing import Annotated

from msgspec import Meta, Struct

from kvstore.net.addresses import host_port
from kvstore.security.credentials import Credentials

Text = Annotated[str, Meta(min_length=1)]


class FolderTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """A folder in which an orchestrator (`fleet up`, or your own) reads plans and reports the pools."""

    folder: Text


class EtcdTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """Two keys in etcd, by which your own orchestrator does the same."""

    endpoints: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """host:port of one or several members of the etcd cluster; the next one is asked if one does not answer."""

    prefix: Text = "/fleet/scaling/"
    """Prefix of the keys `plan` and `report`."""

    credentials: Credentials = Credentials()
    """TLS: `authority` signs etcd's certificate; `certificate` and `key` are the client's. Without any, TLS is off."""

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
    """Kubeconfig file; empty: the service account of the pod."""


Target = FolderTarget | EtcdTarget | KubernetesTarget


class PlanConnectorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a file that says where plans are written."""

    connector: Target
