"""Renderings: the manifests of a deployment are made again only after a change that they depend on."""

import msgspec
import pytest

from fleet.net.kubernetes.kinds import OptionalKinds
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.controller import renderings as module
from operators.controller.renderings import MOST_SHARED, Renderings
from operators.manifests.names import DesiredDeployment
from operators.manifests.objects import with_digest
from operators.manifests.shared import shared
from operators.manifests.workloads import revision
from tests.support.kube.operator import IMAGES

SERVED = OptionalKinds()


def desired(name="one", replicas=1, **spec):
    """Return a new deployment object; objects with the same arguments are equal, but not identical."""
    roles = [
        {"name": "decode", "type": "decode", "replicas": replicas, "scaling": {"mode": "External"}},
        {"name": "router", "type": "router", "replicas": replicas},
    ]
    content = {"model": {"name": "m"}, "roles": roles} | spec
    return DesiredDeployment(name=name, namespace="ns", uid="1", spec=msgspec.convert(content, DisaggDeploymentSpec))


@pytest.fixture
def made(monkeypatch):
    """Return a list of the computations of revisions and of shared objects: each adds its kind and the deployment's name."""
    found = []

    def counted(name, original):
        def call(deployment, *arguments, **more):
            found.append((name, deployment.name))
            return original(deployment, *arguments, **more)

        monkeypatch.setattr(module, name, call)

    counted("revision", revision)
    counted("shared", shared)
    return found


@pytest.mark.parametrize("replicas", [0, 1, 5])
@pytest.mark.parametrize("routers", [0, 1, 3])
def test_renderings_are_those_of_the_deployment_itself(replicas, routers):
    renderings, wanted = Renderings(IMAGES), desired(replicas=replicas)

    assert renderings.revision(wanted) == revision(wanted, IMAGES)
    direct = [with_digest(each) for each in shared(wanted, IMAGES, SERVED, routers=routers)]
    assert renderings.shared(wanted, SERVED, routers) == direct


def test_change_of_worker_replicas_renders_nothing_again(made):
    renderings = Renderings(IMAGES)
    for replicas in (1, 4, 2):
        renderings.revision(desired(replicas=replicas))
        renderings.shared(desired(replicas=replicas), SERVED, 1)

    assert made == [("revision", "one"), ("shared", "one")]


def test_change_of_router_replicas_renders_only_shared_objects(made):
    renderings = Renderings(IMAGES)
    for routers in (1, 2):
        renderings.revision(desired(replicas=routers))
        renderings.shared(desired(replicas=routers), SERVED, routers)

    assert made == [("revision", "one"), ("shared", "one"), ("shared", "one")]


def test_other_changes_render_again_what_depends_on_them(made):
    renderings = Renderings(IMAGES)
    before = renderings.shared(desired(), SERVED, 1)
    assert renderings.shared(desired(), SERVED, 2) != before
    assert renderings.shared(desired(), OptionalKinds(pod_monitors=True), 2) != renderings.shared(desired(), SERVED, 2)
    assert renderings.revision(desired(image="another")) != renderings.revision(desired())
    assert renderings.shared(desired(suspend=True), SERVED, 1) != renderings.shared(desired(), SERVED, 1)
    assert renderings.revision(desired("two")) == revision(desired("two"), IMAGES)


@pytest.mark.parametrize(("before", "after"), [(True, 1), (1, True), (1, 1.0), (False, 0)])
@pytest.mark.parametrize("role", ["decode", "router"])
def test_values_that_are_equal_only_in_python_are_rendered_again(role, before, after):
    def wanted(memory):
        template = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"memory": memory}}}]}}
        roles = [{"name": each, "type": each, "replicas": 1} for each in ("decode", "router")]
        return desired(roles=[each | ({"podTemplate": template} if each["name"] == role else {}) for each in roles])

    renderings = Renderings(IMAGES)
    renderings.revision(wanted(before))
    renderings.shared(wanted(before), SERVED, 1)

    assert renderings.revision(wanted(after)) == revision(wanted(after), IMAGES)
    found = renderings.shared(wanted(after), SERVED, 1)
    assert msgspec.json.encode(found) == msgspec.json.encode(
        [with_digest(each) for each in shared(wanted(after), IMAGES, SERVED, routers=1)]
    )


def test_deleted_deployment_is_rendered_again(made):
    renderings = Renderings(IMAGES)
    for _ in range(2):
        renderings.revision(desired())
        renderings.shared(desired(), SERVED, 1)
        renderings.forget("ns", "one")

    assert made == 2 * [("revision", "one"), ("shared", "one")]


def test_only_the_latest_deployments_shared_objects_are_kept(made):
    renderings = Renderings(IMAGES)
    names = [f"dd{each}" for each in range(MOST_SHARED + 1)]
    for name in names:
        renderings.shared(desired(name), SERVED, 1)
        renderings.check()
    made.clear()

    renderings.shared(desired(names[-1]), SERVED, 1)
    assert made == []
    renderings.shared(desired(names[0]), SERVED, 1)
    assert made == [("shared", names[0])]
