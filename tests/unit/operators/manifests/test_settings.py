"""Settings in manifests: how workers and routers of a deployment find each other, and when pods are ready."""

import msgspec

from fleet.config import parse_changes
from fleet.net.grpc.port import LIVENESS
from operators.api.disagg_deployment import RoleType, ServedTask
from operators.manifests.pods import PRE_STOP_SECONDS
from operators.manifests.settings import CONNECTION_SECONDS
from operators.manifests.shared import shared
from operators.manifests.workloads import workers
from tests.unit.operators.manifests.test_manifests import IMAGES, a_deployment


def named(objects, kind, name):
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def worker_of(deployment):
    role = deployment.workers[0]
    config, child = workers(deployment, role, "abc", IMAGES)
    [container] = child["spec"]["template"]["spec"]["containers"]
    return msgspec.json.decode(config["data"]["settings.json"]), container


def test_worker_registers_with_every_router_pod():
    deployment = a_deployment()
    settings, _ = worker_of(deployment)
    host, _, port = settings["registry"].rpartition(":")
    name, namespace, svc = host.split(".")

    service = named(shared(deployment, IMAGES), "Service", name)

    assert (namespace, svc) == (deployment.namespace, "svc")
    assert service["spec"]["clusterIP"] == "None", "its name stands for all pods"
    assert service["spec"]["publishNotReadyAddresses"]
    assert [str(each["port"]) for each in service["spec"]["ports"]] == [port]


def test_worker_of_a_pooling_model_gets_its_task_and_no_paths():
    generating = a_deployment()
    spec = msgspec.structs.replace(generating.spec, task=ServedTask.EMBED, roles=generating.spec.roles[-1:])
    [role] = spec.roles
    embedding = msgspec.structs.replace(
        generating, spec=msgspec.structs.replace(spec, roles=(msgspec.structs.replace(role, type=RoleType.AGGREGATED),))
    )

    settings, _ = worker_of(embedding)

    assert (settings["task"], settings["role"], settings["kv_paths"]) == ("embed", "both", [])
    assert "task" not in worker_of(generating)[0], "workers that generate are not restarted by an upgrade"


def router_of(deployment):
    objects = shared(deployment, IMAGES)
    config = named(objects, "ConfigMap", f"{deployment.name}-router")
    [container] = named(objects, "Deployment", f"{deployment.name}-router")["spec"]["template"]["spec"]["containers"]
    policy = named(objects, "NetworkPolicy", f"{deployment.name}-router")
    return msgspec.json.decode(config["data"]["settings.json"]), container, policy["spec"]["ingress"]


def test_router_pods_are_peers_with_the_control_secret():
    deployment = msgspec.structs.replace(a_deployment(), control_secret="tiny-control-abc")

    settings, container, admitted = router_of(deployment)

    # Routers find each other by the headless Service by which workers find the routers.
    assert settings["replicas_name"] == f"{worker_of(deployment)[0]['registry'].rpartition(':')[0]}:50054"
    assert (
        settings["replicas_credentials"]
        == settings["control_credentials"]
        == {"secret_file": "/etc/fleet-control/secret"}
    )
    assert "replicas_listen=$(POD_IP):50054" in container["command"]
    assert {"name": "peers", "containerPort": 50054} in container["ports"]
    [rule] = [each for each in admitted if {"port": "peers", "protocol": "TCP"} in each["ports"]]
    [only] = rule["from"]
    assert only["podSelector"]["matchExpressions"] == [
        {"key": "fleet-serving.io/type", "operator": "In", "values": ["router"]}
    ]


def test_router_pods_without_a_control_secret_are_no_peers():
    settings, container, _ = router_of(a_deployment())

    assert not {"replicas_name", "replicas_credentials"} & settings.keys()
    assert not any("replicas_listen" in each for each in container["command"])
    assert "peers" not in {each["name"] for each in container["ports"]}


def test_worker_readiness_is_its_own_answer():
    settings, container = worker_of(a_deployment())

    assert settings["control_listen"] == f"0.0.0.0:{container['readinessProbe']['grpc']['port']}"


def test_worker_has_separate_liveness_and_readiness_probes():
    settings, container = worker_of(a_deployment())

    readiness, liveness, startup = (container[f"{kind}Probe"]["grpc"] for kind in ("readiness", "liveness", "startup"))
    assert settings["control_listen"] == f"0.0.0.0:{liveness['port']}"
    assert liveness == startup == {"port": readiness["port"], "service": LIVENESS}
    assert "service" not in readiness
    allowed = container["startupProbe"]
    assert allowed["periodSeconds"] * allowed["failureThreshold"] > 10 * 60, "a start of ten minutes is no hang"


def test_router_has_separate_liveness_and_readiness_probes():
    deployment = a_deployment()

    router = named(shared(deployment, IMAGES), "Deployment", f"{deployment.name}-router")

    [container] = router["spec"]["template"]["spec"]["containers"]
    asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness", "startup")}
    live = {"path": "/live", "port": "health"}
    assert asked == {"readiness": {"path": "/health", "port": "health"}, "liveness": live, "startup": live}


def test_users_own_command_gets_no_liveness_probe():
    own = {"spec": {"containers": [{"name": "main", "command": ["their-server"]}]}}
    deployment = a_deployment()
    roles = tuple(msgspec.structs.replace(role, pod_template=own) for role in deployment.spec.roles)
    spec = msgspec.structs.replace(deployment.spec, roles=roles)

    _, container = worker_of(msgspec.structs.replace(deployment, spec=spec))

    assert not {"startupProbe", "livenessProbe"} & set(container)


def test_a_workers_generation_is_its_revision():
    _, container = worker_of(a_deployment())

    [revision] = [each for each in container["env"] if each["name"] == "REVISION"]
    assert revision["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['fleet-serving.io/revision']"
    (generation,) = [word for word in container["command"] if word.startswith("generation=")]
    for revision in ("4407e947", "12345678", "aee2b89c"):
        assert parse_changes([generation.replace("$(REVISION)", revision)]) == {"generation": revision}


def test_client_connections_end_before_the_routers_pod():
    deployment = a_deployment()
    made = shared(deployment, IMAGES)
    router = named(made, "Deployment", f"{deployment.name}-router")
    settings = msgspec.json.decode(named(made, "ConfigMap", f"{deployment.name}-router")["data"]["settings.json"])

    [container] = router["spec"]["template"]["spec"]["containers"]
    assert settings["connection_seconds"] == CONNECTION_SECONDS
    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}}
    assert CONNECTION_SECONDS * 1.1 < PRE_STOP_SECONDS, "the library adds up to a tenth"
