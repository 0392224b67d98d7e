"""Manifests of a deployment: Fleet's processes accept their settings, and pods change only when they must."""

import itertools
import re
from pathlib import Path

import msgspec
import pytest

from fleet.config import load, parse_changes
from fleet.core.hub import HubSettings
from fleet.net.kubernetes.kinds import OptionalKinds
from fleet.router.settings.router import RouterSettings
from kvstore.tracing.settings import TracingSettings
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, TracingSpec, WatchdogSpec
from operators.manifests.names import (
    AVOIDED,
    GATE,
    GATED,
    INSTANCE,
    ROLE,
    SPEAKS_TLS,
    TYPE,
    DesiredDeployment,
    GroupPlacement,
)
from operators.manifests.pods import Images, merged
from operators.manifests.settings import PATIENCE_SECONDS, in_bytes
from operators.manifests.shared import shared
from operators.manifests.workloads import group, revision, workers
from workers.engines.vllm import parallelism as vllm_spread
from workers.rank_rendezvous import common_settings_digest
from workers.settings import WorkerSettings
from workers.watchdog import WatchdogSettings

SAMPLES = sorted((Path(__file__).parents[4] / "deploy" / "samples").glob("*.yaml"))
CPU = next(path for path in SAMPLES if path.stem == "cpu")
IMAGES = Images(router="router", worker_cpu="cpu", worker_cuda="cuda", worker_rocm="rocm")


def a_deployment(path=CPU, **changes):
    content = msgspec.yaml.decode(path.read_bytes())
    spec = msgspec.convert(content["spec"] | changes, DisaggDeploymentSpec)
    return DesiredDeployment(name=content["metadata"]["name"], namespace="ns", spec=spec, uid="1-2-3")


def manifests(deployment):
    present = revision(deployment, IMAGES)
    return shared(deployment, IMAGES) + [
        each for role in deployment.workers for each in workers(deployment, role, present, IMAGES)
    ]


def of_kind(found, kind):
    return [each for each in found if each["kind"] == kind]


def settings_of(config, kind, **put_in):
    """Return the settings in a ConfigMap as the pod's process reads them, after the pod's own values were filled in."""
    settings = msgspec.json.decode(config["data"]["settings.json"]) | put_in
    if "embedded_store" in settings:
        settings["embedded_store"]["store_id"] = "pod"
    if "group" in settings:
        settings["group"] |= {"rank": 1, "leader": "pod-0:50063"}
    return msgspec.convert(settings, kind)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("paths", [["direct"], ["store", "direct"]], ids=["direct", "store"])
def test_settings_of_all_pods_are_valid(path, paths):
    deployment = a_deployment(path, kvTransfer={"paths": paths, "storeMemory": "64Mi"})

    configs = of_kind(manifests(deployment), "ConfigMap")

    routers = [each for each in configs if each["metadata"]["labels"][ROLE] == "router"]
    (router,) = routers
    control = settings_of(router, RouterSettings).control_listen.rpartition(":")[2]
    for each in configs:
        if each is not router:
            settings = settings_of(each, WorkerSettings, worker_id="pod")
            assert settings.registry == f"{deployment.name}-router-control.ns.svc:{control}"
            assert (settings.embedded_store is not None) == ("store" in paths)


@pytest.mark.parametrize("told", [{"enabled": False}, {"floorSeconds": 20, "ceilingSeconds": 600}])
def test_workers_get_the_deployments_watchdog_settings(told):
    deployment = a_deployment(watchdog=told)
    settings = [
        settings_of(each, WorkerSettings, worker_id="pod").watchdog
        for each in of_kind(manifests(deployment), "ConfigMap")
        if each["metadata"]["labels"][ROLE] != "router"
    ]

    expected = WatchdogSettings(
        enabled=told.get("enabled", True),
        floor_seconds=told.get("floorSeconds", 10),
        ceiling_seconds=told.get("ceilingSeconds", 300),
    )
    assert settings
    assert all(each == expected for each in settings)


def test_deployment_watchdog_has_the_workers_defaults():
    asked, own = WatchdogSpec(), WatchdogSettings()

    assert (asked.enabled, asked.floor_seconds, asked.ceiling_seconds) == (
        own.enabled,
        own.floor_seconds,
        own.ceiling_seconds,
    )


def test_all_processes_send_traces_to_the_same_collector():
    told = {"endpoint": "http://collector:4318/v1/traces", "protocol": "http", "samplePercent": 5, "slowSeconds": 0}
    found = manifests(a_deployment(SAMPLES[0], tracing=told, kvTransfer={"paths": ["store"]}))
    expected = TracingSettings(endpoint=told["endpoint"], protocol="http", sample_ratio=0.05, slow_seconds=0)

    configs = of_kind(found, "ConfigMap")
    routers = [each for each in configs if each["metadata"]["labels"][ROLE] == "router"]
    workers = [settings_of(each, WorkerSettings, worker_id="pod") for each in configs if each not in routers]
    assert [settings_of(each, RouterSettings).tracing for each in routers] == [expected]
    assert workers
    assert all(each.tracing == each.embedded_store.tracing == expected for each in workers)


def test_headers_and_authority_of_a_collector_come_from_secrets():
    told = {"endpoint": "https://collector:65535", "headersSecret": "collector-key", "authoritySecret": "collector-tls"}
    found = manifests(a_deployment(SAMPLES[0], tracing=told, kvTransfer={"paths": ["store"]}))

    for each in of_kind(found, "ConfigMap"):
        routes = each["metadata"]["labels"][ROLE] == "router"
        tracing = (
            settings_of(each, RouterSettings) if routes else settings_of(each, WorkerSettings, worker_id="pod")
        ).tracing
        files = (Path(tracing.headers_file), Path(tracing.certificate))
        assert [file.name for file in files] == ["headers", "ca.crt"]
    pods = [each["spec"]["template"]["spec"] for each in found if "template" in each.get("spec", ())]
    assert len(pods) > 1
    for pod in pods:
        mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
        headers, authority = (volumes[mounted[str(file.parent)]] for file in files)
        assert headers == {"secretName": "collector-key"}
        assert authority == {"secretName": "collector-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}


@pytest.mark.parametrize("secret", ["", "metrics-tls"])
def test_metrics_of_workers_are_open_to_holders_of_a_key(secret):
    asked = {"keySha256": ["0" * 64], "tlsSecret": secret}
    found = manifests(a_deployment(SAMPLES[0], workerMetrics=asked, kvTransfer={"paths": ["store"]}))

    configs = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["labels"][ROLE] != "router"]
    assert configs
    for each in configs:
        worker = settings_of(each, WorkerSettings, worker_id="pod")
        listens = {"metrics": worker.metrics_listen, "store-metrics": worker.embedded_store.metrics_listen}
        for section in (worker, worker.embedded_store):
            assert section.metrics_access.key_sha256 == ("0" * 64,)
            assert bool(section.metrics_tls.certificate) == bool(secret)
    for each in (each for each in found if "template" in each.get("spec", ())):
        pod = each["spec"]["template"]["spec"]
        main, routes = pod["containers"][0], each["metadata"]["labels"][ROLE] == "router"
        ports = {port["name"]: f"0.0.0.0:{port['containerPort']}" for port in main["ports"]}
        assert listens.items().isdisjoint(ports.items()) if routes else listens.items() <= ports.items()
        folders = [mount["mountPath"] for mount in main["volumeMounts"]]
        assert (str(Path(worker.metrics_tls.certificate).parent) in folders) == (bool(secret) and not routes)
    [policy] = [
        each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"].endswith("-workers")
    ]
    assert policy["ingress"][-1] == {"ports": [{"port": name, "protocol": "TCP"} for name in listens]}


@pytest.mark.parametrize("secret", ["", "public-tls"])
def test_routers_with_a_tls_secret_speak_tls_at_all_client_ports(secret):
    plain, deployment = a_deployment(), a_deployment(routing={"tlsSecret": secret})
    found = manifests(deployment) + shared(deployment, IMAGES, OptionalKinds(pod_monitors=True))

    [config] = [
        each for each in of_kind(manifests(deployment), "ConfigMap") if each["metadata"]["labels"][ROLE] == "router"
    ]
    tls = settings_of(config, RouterSettings).tls
    assert (tls.health, tls.client_authority) == (bool(secret), "")
    [template] = [
        each["spec"]["template"]
        for each in of_kind(manifests(deployment), "Deployment")
        if each["metadata"]["labels"][ROLE] == "router"
    ]
    pod = template["spec"]
    assert template["metadata"]["labels"].get(SPEAKS_TLS) == ("true" if secret else None)
    main = pod["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]}
    volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
    if secret:
        assert [Path(file).name for file in (tls.certificate, tls.key)] == ["tls.crt", "tls.key"]
        assert volumes[mounts[str(Path(tls.certificate).parent)]] == {"secretName": secret}
    schemes = {main[f"{kind}Probe"]["httpGet"].get("scheme", "HTTP") for kind in ("startup", "liveness", "readiness")}
    assert schemes == {"HTTPS" if secret else "HTTP"}
    [service] = [
        each
        for each in of_kind(manifests(deployment), "Service")
        if each["metadata"]["name"] == f"{deployment.name}-router"
    ]
    protocols = {port["name"]: port.get("appProtocol") for port in service["spec"]["ports"]}
    assert protocols == {"http": "https" if secret else None, "grpc": None}
    [monitor] = of_kind(found, "PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint.get("scheme", "http") == ("https" if secret else "http")
    assert revision(deployment, IMAGES) == revision(plain, IMAGES), "the pods of workers stay"


def test_metrics_of_workers_are_closed_without_a_key():
    found = manifests(a_deployment(SAMPLES[0], kvTransfer={"paths": ["store"]}))
    for each in of_kind(found, "ConfigMap"):
        if each["metadata"]["labels"][ROLE] != "router":
            worker = settings_of(each, WorkerSettings, worker_id="pod")
            assert (worker.metrics_listen, worker.embedded_store.metrics_listen) == ("", "")
    [policy] = [
        each["spec"] for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"].endswith("-workers")
    ]
    assert all("from" in rule for rule in policy["ingress"])


def test_deployment_tracing_has_the_processes_defaults():
    asked, own = TracingSpec(), TracingSettings()

    assert not own.is_on
    assert asked.endpoint == own.endpoint
    assert (asked.protocol.value, asked.sample_percent, asked.keep_errors) == (own.protocol, 1, own.keep_errors)
    assert own.sample_ratio == asked.sample_percent / 100
    assert (asked.slow_first_token_seconds, asked.slow_seconds) == (own.slow_first_token_seconds, own.slow_seconds)


@pytest.mark.parametrize("secret", ["", "redis-password"])
def test_all_stores_share_redis_with_password_from_a_file(secret):
    transfer = {"paths": ["store"], "redis": "rediss://cache.ns:6379/2", "redisSecret": secret}
    found = manifests(a_deployment(SAMPLES[0], kvTransfer=transfer))

    configs = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["labels"][ROLE] != "router"]
    assert configs
    for each in configs:
        (tier,) = settings_of(each, WorkerSettings, worker_id="pod").embedded_store.tiers
        assert (tier.url, bool(tier.password_file)) == ("rediss://cache.ns:6379/2", bool(secret))
    for each in (each for each in found if "template" in each.get("spec", ())):
        pod = each["spec"]["template"]["spec"]
        routes = each["metadata"]["labels"][ROLE] == "router"
        mounted = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
        assert mounted == ([secret] if secret and not routes else [])


HUB_MODEL = {"name": "llama", "uri": "meta-llama/Llama-3.3-70B-Instruct@v1"}


def hub_parts(model):
    """Return hub settings, hub volumes and containers of routers, workers, and workers of several nodes."""
    path = next(path for path in SAMPLES if path.stem == "b200-deepseek-moe")
    found = manifests(a_deployment(path, model=model))
    settings = [msgspec.json.decode(each["data"]["settings.json"]).get("hub") for each in of_kind(found, "ConfigMap")]
    templates = [
        spec.get("leaderWorkerTemplate", {}).get("workerTemplate") or spec.get("template")
        for spec in (each.get("spec", {}) for each in found)
    ]
    pods = [template["spec"] for template in templates if template]
    volumes = [{each["name"]: each for each in pod["volumes"] if each["name"].startswith("hub")} for pod in pods]
    return settings, volumes, [pod["containers"][0] for pod in pods]


def of_all(hub):
    """Return the expected hub settings of routers and of two kinds of workers.

    Routers give up after two minutes without data, so that the failure is noticed.
    """
    return [hub | {"patience_seconds": PATIENCE_SECONDS}, hub, hub]


def test_pods_with_a_repository_have_cache_and_token_file():
    settings, volumes, mains = hub_parts(HUB_MODEL | {"tokenSecret": "hugging-face"})
    assert settings == of_all({"cache": "/hub", "token_file": "/etc/fleet-hub/token"})
    secret = {"secretName": "hugging-face", "items": [{"key": "token", "path": "token"}], "optional": True}
    assert volumes == 3 * [
        {"hub": {"name": "hub", "emptyDir": {}}, "hub-token": {"name": "hub-token", "secret": secret}}
    ]
    for main in mains:
        mounted = {each["mountPath"]: each.get("readOnly", False) for each in main["volumeMounts"]}
        assert (mounted["/hub"], mounted["/etc/fleet-hub"]) == (False, True)
        assert "hugging-face" not in str(main["env"])


def test_cache_claim_and_mirror_are_used():
    settings, volumes, _ = hub_parts(HUB_MODEL | {"cacheClaim": "models", "endpoint": "https://mirror.example/hub"})
    assert settings == of_all({"cache": "/hub", "endpoint": "https://mirror.example/hub"})
    assert volumes == 3 * [{"hub": {"name": "hub", "persistentVolumeClaim": {"claimName": "models"}}}]


def test_token_goes_to_a_mirror_without_tls_only_with_permission():
    model = HUB_MODEL | {"endpoint": "http://mirror.example", "tokenSecret": "hugging-face"}
    [(place, why)] = contradictions(a_deployment(model=model).spec)
    assert (place, why.partition(":")[0]) == ("spec.model", "endpoint")
    model |= {"insecure": True}
    assert list(contradictions(a_deployment(model=model).spec)) == []
    settings, _, _ = hub_parts(model)
    hub = {"endpoint": "http://mirror.example", "token_file": "/etc/fleet-hub/token", "insecure": True}
    assert settings == of_all({"cache": "/hub"} | hub)
    with pytest.raises(msgspec.ValidationError, match="in the clear"):
        msgspec.convert(settings[0] | {"insecure": False}, HubSettings)


@pytest.mark.parametrize(
    "model", [HUB_MODEL | {"claim": "weights"}, {"name": "llama", "uri": "/opt/llama"}, {"name": "llama"}]
)
def test_model_in_a_volume_or_image_is_not_fetched(model):
    settings, volumes, _ = hub_parts(model | {"tokenSecret": "hugging-face"})
    assert (settings, volumes) == (3 * [None], 3 * [{}])


@pytest.mark.parametrize("leader_worker_sets", [True, False])
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_workers_admit_only_their_deployments_pods(path, leader_worker_sets):
    """Check the network policy of the workers, which is the only protection of worker groups and block transfers."""
    deployment = a_deployment(path)
    served = OptionalKinds(leader_worker_sets=leader_worker_sets)
    theirs = {"podTemplate": {"metadata": {"labels": {TYPE: "mine", ROLE: "mine", INSTANCE: "mine"}}}}
    roles = tuple(msgspec.convert(msgspec.to_builtins(each) | theirs, RoleSpec) for each in deployment.spec.roles)
    spec = msgspec.structs.replace(deployment.spec, roles=roles)
    deployment = msgspec.structs.replace(deployment, spec=spec)
    pods = {}
    for role in deployment.workers:
        made = [*workers(deployment, role, "rev", IMAGES, served), group(deployment, role, "rev", 0, IMAGES)]
        for child in made[1:]:
            template = child["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate") or child["spec"]["template"]
            pods[child["kind"], role.name] = template["metadata"]["labels"]
    found = shared(deployment, IMAGES)
    [router] = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(found, "Deployment")]
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(found, "NetworkPolicy")}
    to_workers, to_router = policies[f"{deployment.name}-workers"], policies[f"{deployment.name}-router"]

    among, by_routers = to_workers["ingress"]
    assert len(pods) >= 2
    for labels in pods.values():
        assert selects(to_workers["podSelector"], labels)
        assert selects(among["from"][0]["podSelector"], labels)
        assert not selects(to_router["podSelector"], labels)
    assert selects(to_router["podSelector"], router)
    assert selects(by_routers["from"][0]["podSelector"], router)
    assert by_routers["ports"] == [{"port": "worker", "protocol": "TCP"}], "not where ranks meet"
    sources = [each for rule in to_workers["ingress"] for each in rule["from"]]
    assert all(each.keys() == {"podSelector"} for each in sources), "of this namespace"
    strangers = [{}, {INSTANCE: "other", TYPE: "decode"}, {INSTANCE: deployment.name}, {TYPE: "decode"}]
    assert not any(selects(each["podSelector"], labels) for each in sources for labels in strangers)


def test_control_port_of_routers_admits_operator_and_planner():
    deployment = a_deployment()
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(shared(deployment, IMAGES), "NetworkPolicy")}
    rules = policies[f"{deployment.name}-router"]["ingress"]

    [control] = [each for each in rules if each["ports"] == [{"port": "control", "protocol": "TCP"}]]
    ours = {"app.kubernetes.io/part-of": "fleet"}
    for component, admitted in (("operator", True), ("planner", True), ("routers", False)):
        labels = ours | {"app.kubernetes.io/component": component}
        found = [each for each in control["from"] if selects(each["podSelector"], labels)]
        assert [each.get("namespaceSelector") for each in found] == ([{}] if admitted else []), component


def selects(selector, labels):
    """Return whether a label selector matches; only the operator `In` is supported."""
    named = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    each = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in each)
    return named and all(labels.get(one["key"]) in one["values"] for one in each)


def test_draining_workers_of_removed_role_stay_protected():
    before = a_deployment()
    after = a_deployment(roles=[{"name": "all", "type": "aggregated"}])
    [_, child] = workers(before, before.workers[0], "rev", IMAGES)
    [policy] = [each for each in shared(after, IMAGES) if each["metadata"]["name"] == "tiny-workers"]

    assert selects(policy["spec"]["podSelector"], child["spec"]["template"]["metadata"]["labels"])


def test_host_names_stay_in_the_cluster_for_any_namespace():
    deployment = msgspec.structs.replace(a_deployment(SAMPLES[0]), namespace="dev")
    role = next(each for each in deployment.workers if each.nodes_per_replica > 1)
    config = workers(deployment, role, "rev", IMAGES)[0]
    made = group(deployment, role, "rev", 3, IMAGES)
    [main] = made["spec"]["template"]["spec"]["containers"]
    [leader] = [each["value"] for each in main["env"] if each["name"] == "LWS_LEADER_ADDRESS"]

    assert leader == f"{made['metadata']['name']}-0.{made['spec']['serviceName']}.dev.svc"
    assert (
        settings_of(config, WorkerSettings, worker_id="pod").registry
        == f"{deployment.name}-router-control.dev.svc:50052"
    )


@pytest.mark.parametrize(
    ("theirs", "policy"),
    [
        ({}, None),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
        ({"hostNetwork": False}, None),
    ],
)
def test_pods_in_the_host_network_resolve_cluster_names(theirs, policy):
    deployment = a_deployment(roles=[{"name": "all", "type": "aggregated", "podTemplate": {"spec": theirs}}])
    [_, child] = workers(deployment, deployment.workers[0], "rev", IMAGES)

    assert child["spec"]["template"]["spec"].get("dnsPolicy") == policy


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_children_are_owned_and_have_unique_names(path):
    found = manifests(a_deployment(path))

    assert all(each["metadata"]["ownerReferences"][0]["uid"] == "1-2-3" for each in found)
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)


@pytest.mark.parametrize("leader_worker_sets", [True, False])
def test_pods_of_a_multi_node_replica_run_one_engine(tmp_path, leader_worker_sets):
    deployment = a_deployment(next(path for path in SAMPLES if path.stem == "b200-deepseek-moe"))
    (role,) = (each for each in deployment.workers if each.nodes_per_replica > 1)
    served = OptionalKinds(leader_worker_sets=leader_worker_sets)
    config, *others = workers(deployment, role, "rev", IMAGES, served)
    (child,) = others or [group(deployment, role, "rev", 0, IMAGES)]
    spec = child["spec"].get("leaderWorkerTemplate") or child["spec"]
    pod = (spec.get("workerTemplate") or spec["template"])["spec"]
    (main,) = pod["containers"]
    sources = {each["name"]: each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "") for each in main["env"]}
    ranks = []
    for rank in range(role.nodes_per_replica):
        put_in = {"POD_NAME": f"pod-{rank}", "POD_IP": f"10.0.0.{rank}", "REVISION": "rev"}
        put_in |= {"LWS_LEADER_ADDRESS": "pod-0.ns", "LWS_WORKER_INDEX": str(rank)}
        words = [re.sub(r"\$\((\w+)\)", lambda found, have=put_in: have[found[1]], each) for each in main["command"]]
        changes = parse_changes(each for before, each in itertools.pairwise(words) if before == "--set")
        file = tmp_path / "settings.json"
        file.write_text(config["data"]["settings.json"])
        ranks.append(load(file, WorkerSettings, changes))

    assert sources["LWS_WORKER_INDEX"].endswith("worker-index']" if leader_worker_sets else "pod-index']")
    assert [each.group.rank for each in ranks] == [0, 1]
    assert {each.group.leader for each in ranks} == {"pod-0.ns:50063"}
    assert {each.group.nodes for each in ranks} == {2}
    assert len({common_settings_digest(each) for each in ranks}) == 1
    for each in ranks:
        vllm_spread.check(each)
        assert pod["terminationGracePeriodSeconds"] * 1000 > each.drain_timeout_ms, (
            "a rank waits for its leader to drain"
        )


def test_gated_group_keeps_the_gates_of_its_template():
    deployment = a_deployment(next(path for path in SAMPLES if path.stem == "b200-deepseek-moe"))
    (role,) = (each for each in deployment.workers if each.nodes_per_replica > 1)
    theirs = {"name": "example.com/quota"}
    pod = {"spec": {"schedulingGates": [theirs], "containers": [{"name": "main"}]}}
    role = msgspec.structs.replace(role, pod_template=pod)

    plain = group(deployment, role, "rev", 0, IMAGES)
    gated = group(deployment, role, "rev", 0, IMAGES, GroupPlacement(avoided=("n1",), gated=True))

    assert plain["spec"]["template"]["spec"]["schedulingGates"] == [theirs]
    assert gated["spec"]["template"]["spec"]["schedulingGates"] == [theirs, {"name": GATE}]
    assert gated["spec"]["template"]["metadata"]["annotations"][GATED] == "true"
    assert gated["metadata"]["annotations"] == {AVOIDED: "n1", GATED: "true"}


def test_services_and_budgets_select_only_their_pods():
    found = manifests(a_deployment())
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(found, "Deployment")
    }

    def selected(by):
        return sorted(name for name, labels in pods.items() if by.items() <= labels.items())

    services = {each["metadata"]["name"]: selected(each["spec"]["selector"]) for each in of_kind(found, "Service")}
    assert {
        name: [each.rpartition("-")[0] if name in ("tiny-prefill", "tiny-decode") else each for each in pods]
        for name, pods in services.items()
    } == {
        "tiny-router": ["tiny-router"],
        "tiny-router-control": ["tiny-router"],
        "tiny-prefill": ["tiny-prefill"],
        "tiny-decode": ["tiny-decode"],
    }
    budgets = {
        each["metadata"]["name"]: selected(each["spec"]["selector"]["matchLabels"])
        for each in of_kind(found, "PodDisruptionBudget")
    }
    assert {name: len(each) for name, each in budgets.items()} == {
        "tiny-router": 1,
        "tiny-prefill": 1,
        "tiny-decode": 1,
    }


def test_revision_changes_only_with_the_pods():
    deployment = a_deployment()
    roles = msgspec.yaml.decode(CPU.read_bytes())["spec"]["roles"]
    first = revision(deployment, IMAGES)

    def with_role(**fields):
        return revision(a_deployment(roles=[roles[0] | fields if each is roles[0] else each for each in roles]), IMAGES)

    worker = next(index for index, role in enumerate(roles) if role["type"] == "decode")
    scaled = [dict(role) for role in roles]
    scaled[worker]["replicas"] = 7
    assert revision(a_deployment(roles=scaled), IMAGES) == first
    assert revision(a_deployment(roles=list(reversed(roles))), IMAGES) == first
    assert revision(a_deployment(routing={"policy": "round_robin"}), IMAGES) == first
    assert with_role(replicas=3) == first
    scaled[worker]["drain"] = {"timeoutSeconds": 7}
    assert revision(a_deployment(roles=scaled), IMAGES) != first
    assert revision(a_deployment(image="another"), IMAGES) != first


def test_pod_template_overrides_and_named_lists_merge():
    ours = {"containers": [{"name": "main", "image": "a", "env": [{"name": "A", "value": "1"}]}]}
    theirs = {
        "containers": [{"name": "side"}, {"name": "main", "env": [{"name": "B", "value": "2"}]}],
        "hostNetwork": True,
    }

    assert merged(ours, theirs) == {
        "containers": [
            {"name": "main", "image": "a", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"name": "side"},
        ],
        "hostNetwork": True,
    }


def test_udp_port_keeps_the_tcp_port_of_the_same_number():
    ours = {"ports": [{"name": "worker", "containerPort": 9000}]}
    quic = {"name": "quic", "containerPort": 9000, "protocol": "UDP"}
    renamed = {"name": "mine", "containerPort": 9000, "protocol": "TCP"}

    assert merged(ours, {"ports": [quic]}) == {"ports": [*ours["ports"], quic]}
    assert merged(ours, {"ports": [renamed]}) == {"ports": [renamed]}


def test_faulty_items_of_several_nodes_reach_the_api_server():
    """Merge twice, because the operator merges the variables of its groups over a template that was merged already."""
    nameless, repeated = [{"image": "a"}, {"image": "b"}], {"name": "side", "image": "c"}
    theirs = {"containers": [{"name": "side"}, repeated, *nameless]}

    once = merged({"containers": [{"name": "main"}]}, theirs)

    assert once == {"containers": [{"name": "main"}, {"name": "side"}, repeated, *nameless]}
    assert merged(once, {"containers": [{"name": "main", "env": []}]}) == {
        "containers": [{"name": "main", "env": []}, {"name": "side"}, repeated, *nameless]
    }


def test_user_cannot_change_selecting_labels():
    roles = [
        {"name": "all", "type": "aggregated", "podTemplate": {"metadata": {"labels": {ROLE: "mine", "team": "a"}}}}
    ]
    (child,) = [
        each
        for each in manifests(a_deployment(roles=roles))
        if each["metadata"]["name"].startswith("tiny-all-") and each["kind"] == "Deployment"
    ]

    labels = child["spec"]["template"]["metadata"]["labels"]
    assert labels[ROLE] == "all"
    assert labels["team"] == "a"
    assert child["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("written", "meant"),
    [("8Gi", 8 << 30), ("500M", 500_000_000), ("1.5G", 1_500_000_000), ("1024", 1024), ("64Ki", 65536)],
)
def test_quantities_are_read_as_kubernetes_does(written, meant):
    assert in_bytes(written) == meant
