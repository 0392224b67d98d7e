"""Kubeconfig: reads how to reach the API server, from the file that kubectl reads too, or from a pod's service account."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from fleet.net.kubernetes.ports import KubernetesError

UNUSABLE = (ConfigException, OSError, ValueError, KeyError, TypeError, yaml.YAMLError)
"""Exceptions that the client library raises for a file that is not a usable kubeconfig."""


async def api_configuration(kubeconfig: str) -> Configuration:
    """Return the address, credentials and certificate authority of the API server.

    Args:
        kubeconfig: A file; empty: the service account of this pod.

    Raises:
        KubernetesError: The file is missing or unusable, or this is not a pod; the message begins with the name of the
            setting.
    """
    configuration = Configuration()
    if not kubeconfig:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise KubernetesError(f"kubeconfig: is required outside of a pod: {error}") from error
        return _with_environment(configuration)
    if not Path(kubeconfig).exists():  # noqa: ASYNC240 - the file is looked for once, at the start
        raise KubernetesError(
            f"kubeconfig: {kubeconfig}: No such file; name the file that kubectl uses for the cluster"
        )
    try:
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=configuration
        )
    except UNUSABLE as error:
        why = " ".join(str(error).split())
        raise KubernetesError(f"kubeconfig: {kubeconfig}: is not a usable kubeconfig: {why}") from error
    return _with_environment(configuration)


def _with_environment(configuration: Configuration) -> Configuration:
    """Read the environment's proxy once, because each request would otherwise read it in another thread.

    ~/.netrc is not read at all.
    """
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or environment_proxy(configuration.host)
    return configuration


def environment_proxy(address: str) -> str | None:
    """Return the proxy for an address; None: no proxy.

    It follows from HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as for all clients of Kubernetes.
    """
    parts = urlsplit(address)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
