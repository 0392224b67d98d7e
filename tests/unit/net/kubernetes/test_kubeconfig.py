"""Kubeconfig files: the address of the API server in them, and the errors for unusable files."""

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes.kubeconfig import api_configuration, environment_proxy
from fleet.net.kubernetes.ports import KubernetesError

USABLE = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: this, user: me}}]
clusters: [{name: this, cluster: {server: "http://127.0.0.1:8001"}}]
users: [{name: me, user: {}}]
"""


async def test_kubeconfig_gives_the_servers_address(tmp_path):
    file = tmp_path / "config"
    file.write_text(USABLE)

    assert (await api_configuration(str(file))).host == "http://127.0.0.1:8001"


async def test_missing_kubeconfig_is_named_with_advice():
    with pytest.raises(KubernetesError, match=r"^kubeconfig: /nowhere: No such file; name the file that kubectl"):
        await api_configuration("/nowhere")


@pytest.mark.parametrize("content", ["", "text", "[1]", "a: [", "\0", "apiVersion: v1"])
async def test_invalid_kubeconfig_is_refused_in_one_line(content, tmp_path):
    file = tmp_path / "config"
    file.write_text(content)

    with pytest.raises(KubernetesError, match=rf"^kubeconfig: {file}: is not a usable kubeconfig: \S.*\Z"):
        await api_configuration(str(file))


async def test_folder_is_not_a_kubeconfig(tmp_path):
    with pytest.raises(KubernetesError, match="Is a directory"):
        await api_configuration(str(tmp_path))


async def test_kubeconfig_is_required_outside_of_a_pod(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubernetesError, match=r"^kubeconfig: is required outside of a pod: "):
        await api_configuration("")


def test_proxy_of_the_environment_is_taken_unless_it_is_bypassed(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert environment_proxy("https://10.0.0.1:6443") is None

    monkeypatch.setenv("https_proxy", "http://proxy.test:3128")
    assert environment_proxy("https://10.0.0.1:6443") == "http://proxy.test:3128"
    monkeypatch.setenv("no_proxy", "10.0.0.1,.svc")
    assert environment_proxy("https://10.0.0.1:6443") is None
    assert environment_proxy("https://kubernetes.default.svc:443") is None
    assert environment_proxy("https://api.example.org") == "http://proxy.test:3128"


async def test_proxy_of_the_kubeconfig_counts_first(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    file = tmp_path / "config"

    file.write_text(USABLE.replace("127.0.0.1", "api.test"))
    assert (await api_configuration(str(file))).proxy == "http://proxy.test:3128"
    file.write_text(
        USABLE.replace("127.0.0.1", "api.test").replace('8001"', '8001", proxy-url: "http://other.test:80"')
    )
    assert (await api_configuration(str(file))).proxy == "http://other.test:80"
