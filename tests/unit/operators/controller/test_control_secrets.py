"""Control secrets: their derivation from the operator's secret, and where they are stored."""

import base64

import msgspec
import pytest
from msgspec import structs

from fleet.net.kubernetes.ports import NameTaken, ObjectMissing
from fleet.net.kubernetes.views import ObjectMetadata, SecretData
from fleet.router.settings.router import RouterSettings
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType
from operators.api.fields import ModelSource
from operators.controller.control_secrets import ControlSecret, ControlSecrets, UnusableSecret
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images, pod_template
from operators.manifests.settings import router_settings, worker_settings
from workers.settings import WorkerSettings

IMAGES = Images(router="r", worker_cpu="c", worker_cuda="u", worker_rocm="o")


class Cluster:
    """Fake API server that keeps Secrets and counts requests."""

    def __init__(self, **data: str) -> None:
        self.kept = dict(data)
        self.asked: list[str] = []

    async def get(self, kind, view, namespace, name):
        self.asked.append("get")
        if not self.kept:
            raise ObjectMissing("there is none")
        return SecretData(metadata=ObjectMetadata(name=name, namespace=namespace), data=self.kept)

    async def create(self, kind, view, namespace, manifest):
        self.asked.append("create")
        if self.kept:
            raise NameTaken("there is one")
        self.kept = dict(manifest["data"])


def a_deployment(**fields) -> DesiredDeployment:
    spec = DisaggDeploymentSpec(
        model=ModelSource(name="tiny"), roles=(RoleSpec(name="all", type=RoleType.AGGREGATED),), **fields
    )
    return DesiredDeployment(name="tiny", namespace="dev", spec=spec, uid="u")


async def loaded(cluster: Cluster) -> ControlSecrets:
    secrets = ControlSecrets(cluster, "fleet", "own")
    await secrets.load()
    await secrets.load()
    return secrets


async def test_operators_secret_is_created_once_and_read_again():
    cluster = Cluster()
    first = await loaded(cluster)
    assert cluster.asked == ["get", "create", "get"]

    second = await loaded(cluster)

    assert first.of("dev", "tiny") == second.of("dev", "tiny") != b""
    assert cluster.asked[3:] == ["get"]


async def test_deployments_have_different_secrets():
    secrets = await loaded(Cluster())

    contents = {secrets.of(*of) for of in (("dev", "tiny"), ("dev", "large"), ("prod", "tiny"))}

    assert len(contents) == 3
    assert all(len(each) == 64 for each in contents)


async def test_without_a_name_there_are_no_secrets():
    cluster = Cluster()
    secrets = ControlSecrets(cluster, "fleet", "")
    await secrets.load()

    assert (secrets.of("dev", "tiny"), cluster.asked) == (b"", [])


@pytest.mark.parametrize(
    "data", [{"other": "x"}, {"secret": "!"}, {"secret": base64.b64encode(b"short").decode()}], ids=str
)
async def test_unusable_secret_is_named(data):
    with pytest.raises(UnusableSecret, match="Secret fleet/own: "):
        await loaded(Cluster(**data))


def test_pods_get_the_secret_and_settings_name_its_file():
    secret = ControlSecret(b"x" * 64)
    deployment = structs.replace(a_deployment(), control_secret=secret.name("tiny"))
    manifest = secret.manifest(deployment)
    assert manifest["metadata"]["name"] == deployment.control_secret
    assert manifest["immutable"]
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "u"

    (worker,) = deployment.workers
    file = "/etc/fleet-control/secret"
    assert router_settings(deployment)["control_credentials"] == {"secret_file": file}
    told = worker_settings(deployment, worker)
    assert told["registry_credentials"] == told["control_credentials"] == {"secret_file": file}
    for role in (worker, deployment.router):
        spec = pod_template(deployment, role, IMAGES, "")["spec"]
        assert {"name": "control", "secret": {"secretName": deployment.control_secret}} in spec["volumes"]
        mount = {"name": "control", "mountPath": "/etc/fleet-control", "readOnly": True}
        assert mount in spec["containers"][0]["volumeMounts"]


def test_routers_without_a_secret_trust_their_network():
    settings = router_settings(a_deployment())

    assert settings["control_credentials"] == {"insecure": True}
    assert msgspec.convert(settings, RouterSettings)


def test_workers_without_a_secret_trust_their_network():
    deployment = a_deployment()
    (worker,) = deployment.workers

    settings = worker_settings(deployment, worker)

    assert settings["control_credentials"] == {"insecure": True}
    assert msgspec.convert({**settings, "worker_id": "pod"}, WorkerSettings)
