"""How the API server is reached: as a file says that kubectl would read too, or as a pod does."""

from pathlib import Path

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from fleet.net.kubernetes.ports import KubernetesError

UNUSABLE = (ConfigException, OSError, ValueError, KeyError, TypeError, yaml.YAMLError)
"""What the client raises for a file that is none of kubectl's."""


async def api_configuration(kubeconfig: str) -> Configuration:
    """Address, credentials and authority of the API server.

    Args:
        kubeconfig: A file; empty: the service account of the pod that this runs in.

    Raises:
        ClusterError: There is no such file, it cannot be used, or this is no pod; begins with the name of the setting.
    """
    configuration = Configuration()
    if not kubeconfig:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise KubernetesError(f"kubeconfig: is needed outside of a pod: {error}") from error
        return configuration
    if not Path(kubeconfig).exists():  # noqa: ASYNC240 - once, at the start
        raise KubernetesError(
            f"kubeconfig: {kubeconfig}: No such file; name the one that kubectl reaches the cluster by"
        )
    try:
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=configuration
        )
    except UNUSABLE as error:
        why = " ".join(str(error).split())
        raise KubernetesError(f"kubeconfig: {kubeconfig}: cannot be used as one: {why}") from error
    return configuration
