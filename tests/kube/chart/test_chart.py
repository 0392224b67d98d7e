"""Rendered chart: it is the same by Helm 3 and Helm 4, and valid for all supported versions of Kubernetes."""

import re
import shutil

import jsonschema
import msgspec
import pytest
import yaml

from fleet.config import load
from fleet.core.discovery import EtcdDiscovery, KubernetesDiscovery
from fleet.net.kubernetes.leader import LeaseSettings
from fleet.router.settings.router import RouterMetricsAccess, RouterSettings
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess
from operators.chart.crds import KINDS, definition
from operators.chart.metric_catalogue import ROUTER
from operators.manifests.names import GRPC, HTTP
from operators.manifests.workloads import router_deployment
from operators.planner.settings import KubePlannerSettings, PlannerLeaseSettings
from operators.rbac import ACCESS, CLUSTER_ACCESS, LEASE_NAME, OWN_SECRET, PLANNER_ACCESS
from operators.settings import OperatorSettings
from tests.support.kube.charts import (
    CHART,
    GOLDEN,
    MONITORS,
    VALUES,
    VERSIONS,
    by_name,
    documents,
    helm_3_lint,
    helm_3_render,
    helm_4_lint,
    helm_4_render,
    loaded_chart,
    pods,
    rendered,
)
from tests.support.kube.documentation import is_ours, shown_manifests, shown_values
from tests.support.kube.pod_security import complaints
from tests.support.kube.published_schemas import check
from tests.unit.operators.manifests.test_manifests import IMAGES
from tests.unit.operators.manifests.test_manifests import a_deployment as operators_deployment

FLEETS_PODS = {"app.kubernetes.io/part-of": "fleet"}
FOREIGN = {"Certificate"}
"""Kinds that Kubernetes itself does not define, so no published schema has them."""


@pytest.mark.parametrize("name", VALUES)
def test_both_helms_lint_the_chart(name):
    assert "0 chart(s) failed" in helm_3_lint(VALUES[name])

    report = helm_4_lint(VALUES[name])
    assert not report["errors"]
    assert [each["error"] for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("name", VALUES)
def test_both_helms_render_the_same_documents(name):
    third, fourth = by_name(rendered(name)), by_name(documents(helm_4_render(VALUES[name])))

    assert set(third) == set(fourth)
    for key, document in third.items():
        assert fourth[key] == document, key


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_version_gets_the_same_documents(version):
    for name in VALUES:
        assert rendered(name, "--kube-version", version) == rendered(name)


def test_every_supported_version_accepts_all_documents():
    found = {
        msgspec.json.encode(each): each for name in VALUES for each in rendered(name) if each["kind"] not in FOREIGN
    }
    for document in found.values():
        for version in VERSIONS:
            check(document, version)


def test_unknown_field_of_a_version_is_found():
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "it"}, "automountToken": True}

    with pytest.raises(jsonschema.ValidationError, match="automountToken"):
        check(account, "1.36")


@pytest.mark.parametrize("name", VALUES)
def test_every_pod_is_restricted_with_limited_writes(name):
    for where, spec in pods(rendered(name)):
        assert list(complaints(spec)) == [], where
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in spec["containers"]), where
        asks = "operator" in where or "planner" in where or (name == "brought" and "routers" in where)
        assert spec["automountServiceAccountToken"] is asks, where


def test_pod_check_reports_unrestricted_pods():
    spec = {"containers": [{"name": "it", "securityContext": {"runAsUser": 0}}], "hostNetwork": True}
    spec["volumes"] = [{"name": "host", "hostPath": {"path": "/"}}]

    assert set(complaints(spec)) == {
        "hostNetwork",
        "volume host",
        "it: allowPrivilegeEscalation",
        "it: capabilities.drop",
        "it: runAsNonRoot",
        "it: runAsUser",
        "it: seccompProfile",
    }


@pytest.mark.parametrize("name", VALUES)
def test_selectors_select_existing_objects(name):
    """The labels in selectors of Services, budgets, policies, monitors and workloads match pods or Services."""
    found = rendered(name, *MONITORS)
    labelled = [each["spec"]["template"]["metadata"]["labels"] for each in found if "template" in each.get("spec", {})]
    labelled += [each["metadata"]["labels"] for each in found if each["kind"] == "Pod"]
    services = [each["metadata"]["labels"] for each in found if each["kind"] == "Service"]
    for each in found:
        spec = each.get("spec", {})
        wanted = spec.get("selector") or spec.get("podSelector") or {}
        wanted = wanted.get("matchLabels", wanted)
        candidates = services if each["kind"] == "ServiceMonitor" else labelled
        if wanted:
            matching = [labels for labels in candidates if wanted.items() <= labels.items()]
            assert len(matching) == 1, f"{each['kind']} {each['metadata']['name']}: {wanted} selects {len(matching)}"


@pytest.mark.parametrize("name", VALUES)
def test_named_ports_and_volumes_exist(name):
    found = rendered(name)
    claims = {
        f"StatefulSet {each['metadata']['name']}": {claim["metadata"]["name"] for claim in claimed}
        for each in found
        if (claimed := each.get("spec", {}).get("volumeClaimTemplates"))
    }
    for where, spec in pods(found):
        volumes = {each["name"] for each in spec.get("volumes", ())} | claims.get(where, set())
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes, where
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(probe, {})
                assert {each["port"] for each in (asked.get("httpGet"), asked.get("tcpSocket")) if each} <= ports, where


def test_routers_settings_file_is_valid(tmp_path):
    for name in ("default", "everything", "brought"):
        config = by_name(rendered(name))["ConfigMap", f"{'fleet-llm' if name == 'everything' else 'fleet'}-routers"]
        path = tmp_path / f"{name}.json"
        path.write_text(config["data"]["settings.json"])
        settings = load(path, RouterSettings)

        assert settings.http_listen == "0.0.0.0:8000"
    everything, brought = load(tmp_path / "everything.json", RouterSettings), settings
    assert everything.max_queued == 1_000_000
    assert everything.kserve_listen == "0.0.0.0:8001"
    assert everything.tenants_redis == "redis://fleet-llm-redis:6379/0"
    assert everything.worker_credentials.authority == "/etc/fleet/tls/ca.crt"
    assert everything.discovery == EtcdDiscovery(endpoints=("fleet-llm-etcd:2379",), prefix="/fleet/fleet/workers/")
    assert brought.tenants_redis == "redis://redis.data:6380/0"
    assert brought.discovery == KubernetesDiscovery(cluster="llama", namespace="serving")


def test_external_etcd_is_used_with_tls_if_configured(tmp_path):
    values = VALUES["brought"] | {
        "discovery": {"source": "Etcd"},
        "etcd": {"endpoints": ["etcd-0:2379", "etcd-1:2379"], "tls": True},
    }
    found = by_name(documents(helm_3_render(values)))
    path = tmp_path / "settings.json"
    path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
    discovery = load(path, RouterSettings).discovery

    assert discovery.endpoints == ("etcd-0:2379", "etcd-1:2379")
    assert discovery.credentials.certificate == "/etc/fleet/tls/tls.crt"
    assert not any(kind == "StatefulSet" for kind, _ in found)


def test_operators_settings_file_is_valid(tmp_path):
    settings = {}
    for name, release in (("default", "fleet"), ("everything", "fleet-llm")):
        config = by_name(rendered(name))["ConfigMap", f"{release}-operator"]
        path = tmp_path / f"{name}.json"
        path.write_text(config["data"]["settings.json"])
        settings[name] = load(path, OperatorSettings, {"identity": "operator-0"})

    assert settings["default"].namespaces == ("serving",)
    assert settings["everything"].namespaces == ()
    assert settings["everything"].at_once == 16
    assert settings["everything"].lease == LeaseSettings(
        name="fleet-llm-operator", namespace="serving", owner="fleet-llm-operator", duration_seconds=30
    )
    assert ("Deployment", settings["everything"].lease.owner) in by_name(rendered("everything")), (
        "the Lease goes with it"
    )


def test_planners_settings_file_is_valid(tmp_path):
    settings = {}
    for name, release in (("everything", "fleet-llm"), ("brought", "fleet")):
        config = by_name(rendered(name))["ConfigMap", f"{release}-planner"]
        path = tmp_path / f"{name}.json"
        path.write_text(config["data"]["settings.json"])
        settings[name] = load(path, KubePlannerSettings, {"identity": "planner-0"})

    everything, brought = settings["everything"], settings["brought"]
    assert everything.namespaces == ()
    assert everything.stale_seconds == 10.0
    assert everything.lease == PlannerLeaseSettings(
        name="fleet-llm-planner", namespace="serving", owner="fleet-llm-planner", duration_seconds=30
    )
    assert (everything.control_listen, everything.control_credentials.secret_file) == (
        "0.0.0.0:50053",
        "/etc/fleet/control/secret",
    )
    assert brought.namespaces == ("serving",)
    assert brought.control_listen == "", "a Unix socket in the pod"
    assert ("Deployment", everything.lease.owner) in by_name(rendered("everything")), "the Lease goes with it"


def test_planner_is_installed_only_if_enabled():
    components = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in rendered("default")}
    assert "planner" not in components
    told = {}
    for name, release in (("default", "fleet"), ("brought", "fleet")):
        told[name] = msgspec.json.decode(
            by_name(rendered(name))["ConfigMap", f"{release}-operator"]["data"]["settings.json"]
        )
    assert [told[name]["plans_obeyed"] for name in ("default", "brought")] == [False, True]
    planner = by_name(rendered("brought"))["Deployment", "fleet-planner"]["spec"]
    assert planner["replicas"] == 3
    (container,) = planner["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_planners_control_secret_is_mounted_and_only_named():
    planner = by_name(rendered("everything"))["Deployment", "fleet-llm-planner"]["spec"]["template"]["spec"]
    (container,) = planner["containers"]

    assert {"name": "control", "containerPort": 50053} in container["ports"]
    secret = {"secretName": "fleet-planner", "items": [{"key": "secret", "path": "secret"}]}
    assert {"name": "control", "secret": secret} in planner["volumes"]
    assert {"name": "control", "mountPath": "/etc/fleet/control", "readOnly": True} in container["volumeMounts"]


def test_secret_settings_are_mounted_and_only_named():
    router = by_name(rendered("everything"))["Deployment", "fleet-llm-routers"]["spec"]["template"]["spec"]

    (container,) = router["containers"]
    assert "--set-file=tenant_secret=/etc/fleet/secrets/0/tenant-secret" in container["args"]
    assert "--set-file=tenants=/etc/fleet/secrets/1/tenants.json" in container["args"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    secrets = {each["name"]: each["secret"] for each in router["volumes"] if "secret" in each}
    assert secrets[mounts["/etc/fleet/secrets/1"]] == {
        "secretName": "fleet",
        "items": [{"key": "tenants.json", "path": "tenants.json"}],
    }
    assert not any(each["kind"] == "Secret" for each in rendered("everything"))

    operator = by_name(rendered("everything"))["Deployment", "fleet-llm-operator"]["spec"]["template"]["spec"]
    (container,) = operator["containers"]
    assert "--set-file=probe.keys=/etc/fleet/secrets/0/keys.json" in container["args"]
    secrets = {each["name"]: each["secret"] for each in operator["volumes"] if "secret" in each}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert secrets[mounts["/etc/fleet/secrets/0"]] == {
        "secretName": "fleet-probes",
        "items": [{"key": "keys.json", "path": "keys.json"}],
    }


def test_helm_tests_key_is_mounted_only():
    test = by_name(rendered("everything"))["Pod", "fleet-llm-test"]["spec"]
    (container,) = test["containers"]

    assert container["args"] == ["--api-key-file", "/etc/fleet/api-key/key", "--insecure"]
    assert "env" not in container
    secret = {"secretName": "fleet-test", "items": [{"key": "api-key", "path": "key"}]}
    assert {"name": "api-key", "secret": secret} in test["volumes"]
    for values in ({}, {"test": {"apiKey": {"name": "fleet-test"}}}, {"test": {"model": "llama"}}):
        (keyless,) = by_name(documents(helm_3_render(values)))["Pod", "fleet-test"]["spec"]["containers"]
        assert "args" not in keyless
        assert [each["name"] for each in keyless["volumeMounts"]] == ["scratch"]


def test_key_of_the_helm_test_needs_tls_or_an_insecure_value():
    def options(key, **values):
        test = {"test": {"model": "llama", "apiKey": {"name": "fleet-test"} | key}}
        (container,) = by_name(documents(helm_3_render(values | test)))["Pod", "fleet-test"]["spec"]["containers"]
        return container["args"]

    tls = {"routers": {"tls": {"secret": "public"}}}
    refused = helm_3_render({"test": {"model": "llama", "apiKey": {"name": "fleet-test"}}}, code=1)

    assert "test.apiKey: the key would cross the network in the clear" in refused
    assert "test.apiKey.insecure" in refused
    assert "--insecure" in options({"insecure": True})
    for key in ({}, {"insecure": True}):
        assert "--insecure" not in options(key, **tls)


def test_releases_own_etcd_keeps_nothing():
    etcd = by_name(rendered("everything"))["StatefulSet", "fleet-llm-etcd"]["spec"]

    assert etcd["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}


def test_only_changed_settings_restart_routers(tmp_path):
    def template(text):
        return by_name(documents(text))["Deployment", "fleet-routers"]["spec"]["template"]

    before = template(helm_3_render({}))
    assert template(helm_3_render({"routers": {"settings": {"max_queued": 7}}})) != before
    assert template(helm_3_render({"operator": {"replicas": 1}})) == before


def test_router_without_workers_is_ready_when_it_listens():
    def path(values):
        router = by_name(documents(helm_3_render(values)))["Deployment", "fleet-routers"]
        return router["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]

    assert path({}) == "/live"
    assert path({"routers": {"readiness": "Serving"}}) == "/health"
    assert path(VALUES["brought"]) == "/health"
    assert path(VALUES["brought"] | {"routers": {"readiness": "Listening"}}) == "/live"


def test_operator_and_chart_use_the_same_router_liveness_probe():
    chart = by_name(documents(helm_3_render({})))["Deployment", "fleet-routers"]
    operator = router_deployment(operators_deployment(), IMAGES, "digest", {"http": HTTP, "grpc": GRPC}, replicas=1)

    def questions(manifest):
        [container] = manifest["spec"]["template"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        asked = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe")}
        return {probe: (question["path"], ports[question["port"]]) for probe, question in asked.items()}

    assert questions(operator) == questions(chart)


def test_control_service_resolves_to_all_router_pods():
    named = by_name(documents(helm_3_render({"routers": {"controlSecret": "fleet-control"}})))
    for found, release in ((named, "fleet"), (by_name(rendered("everything")), "fleet-llm")):
        service = found["Service", f"{release}-routers-control"]["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        # A Service without an address does not translate ports.
        assert [(each["port"], each["targetPort"]) for each in service["ports"]] == [(50052, "control")]


@pytest.mark.parametrize("on", [False, True])
def test_health_and_picker_get_tls_if_asked_for(tmp_path, on):
    values = {
        "routers": {"tls": {"secret": "public", "health": on, "endpointPicker": on}},
        "monitoring": {"monitors": {"enabled": True}},
    }
    found = by_name(documents(helm_3_render(values, *MONITORS)))
    path = tmp_path / "settings.json"
    path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
    tls = load(path, RouterSettings).tls
    [router, *_] = found["Deployment", "fleet-routers"]["spec"]["template"]["spec"]["containers"]
    schemes = {router[f"{probe}Probe"]["httpGet"].get("scheme") for probe in ("startup", "liveness", "readiness")}
    [monitored] = found["PodMonitor", "fleet-routers"]["spec"]["podMetricsEndpoints"]

    assert (tls.health, tls.endpoint_picker) == (on, on)
    assert schemes == {"HTTPS" if on else None}
    assert monitored.get("scheme") == ("https" if on else None)


def test_client_ports_get_tls_from_a_secret(tmp_path):
    def told(**tls):
        found = by_name(documents(helm_3_render({"routers": {"tls": tls}})))
        path = tmp_path / "settings.json"
        path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
        pod = found["Deployment", "fleet-routers"]["spec"]["template"]["spec"]
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "client-tls"] or [None]
        volumes = {each["name"]: each.get("secret") for each in pod["volumes"]}
        (http, *_) = found["Service", "fleet-routers"]["spec"]["ports"]
        return load(path, RouterSettings).tls, mount, volumes.get("client-tls"), http, found["Pod", "fleet-test"]

    tls, mount, secret, http, test = told(secret="public", clientAuthority="ca.crt")
    folder = mount["mountPath"]
    assert (tls.certificate, tls.key) == (f"{folder}/tls.crt", f"{folder}/tls.key")
    assert tls.client_authority == f"{folder}/ca.crt"
    assert secret == {"secretName": "public"}, "a volume with subPath or items of its own would not be renewed"
    assert "subPath" not in mount
    assert http["appProtocol"] == "https"
    assert "https://fleet-routers.serving.svc:8000" in str(test)
    assert (tls.health, tls.endpoint_picker) == (False, False)
    tls, mount, secret, http, test = told()
    assert (tls.certificate, mount, secret) == ("", None, None)
    assert "appProtocol" not in http
    assert "https" not in str(test)


def test_router_pods_are_peers_if_they_can_prove_a_secret(tmp_path):
    def peers(values):
        found = by_name(documents(helm_3_render(values)))
        path = tmp_path / "settings.json"
        path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
        (container,) = found["Deployment", "fleet-routers"]["spec"]["template"]["spec"]["containers"]
        admitted = found["NetworkPolicy", "fleet-routers"]["spec"]["ingress"]
        rules = [each["from"] for each in admitted if {"port": "peers"} in each["ports"]]
        ports = [each["containerPort"] for each in container["ports"] if each["name"] == "peers"]
        listens = [each for each in container["args"] if each.startswith("--set=replicas_listen=")]
        return load(path, RouterSettings), ports, listens, rules

    settings, ports, listens, rules = peers({"routers": {"controlSecret": "fleet-control"}})
    assert settings.replicas_name == "fleet-routers-control.serving.svc:50054"
    assert settings.replicas_credentials == Credentials(secret_file="/etc/fleet/control/secret")
    assert (ports, listens) == ([50054], ["--set=replicas_listen=$(POD_IP):50054"])
    [[only]] = rules
    assert only["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "routers"
    for values in ({}, {"controlSecret": "fleet-control", "processes": 2}):
        settings, *others = peers({"routers": values})
        assert (settings.replicas_name, *others) == ("", [], [], []), values


def test_routers_have_a_control_port_only_with_proof(tmp_path):
    def told(values):
        found = by_name(documents(helm_3_render(values)))
        path = tmp_path / "settings.json"
        path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
        pod = found["Deployment", "fleet-routers"]["spec"]["template"]["spec"]
        ports = {port["name"] for port in pod["containers"][0]["ports"]}
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        settings = load(path, RouterSettings)
        has_service = ("Service", "fleet-routers-control") in found
        assert ("control" in ports) is has_service is bool(settings.control_listen)
        return settings, mounts

    private, _ = told({})
    assert (private.control_listen, private.control_credentials) == ("", Credentials())
    secret, mounts = told({"routers": {"controlSecret": "fleet-control"}})
    assert secret.control_credentials == Credentials(secret_file="/etc/fleet/control/secret")
    assert "/etc/fleet/control" in mounts
    tls, _ = told({"tls": {"source": "Secret", "secret": "fleet-tls"}})
    assert tls.control_credentials == tls.worker_credentials
    assert tls.control_credentials.authority


def test_router_finishes_within_its_pods_grace_period(tmp_path):
    def settings(values):
        made = by_name(documents(helm_3_render({"routers": values})))
        path = tmp_path / "settings.json"
        path.write_text(made["ConfigMap", "fleet-routers"]["data"]["settings.json"])
        return load(path, RouterSettings), made["Deployment", "fleet-routers"]["spec"]["template"]["spec"]

    for seconds in (20, 60, 3600):
        told, pod = settings({"terminationSeconds": seconds})
        hook = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert 10 <= told.drain_timeout_ms / 1000 <= pod["terminationGracePeriodSeconds"] - hook - 5
        assert 0 < told.connection_seconds * 1.1 < hook
    assert settings({"settings": {"connection_seconds": 0}})[0].connection_seconds == 0


def test_gateways_use_routers_with_endpoint_pickers():
    def found(settings, **values):
        made = by_name(documents(helm_3_render({"routers": {"settings": settings} | values})))
        container = made["Deployment", "fleet-routers"]["spec"]["template"]["spec"]["containers"][0]
        ports = {each["name"]: each["port"] for each in made["Service", "fleet-routers"]["spec"]["ports"]}
        return ports.get("picker"), [each for each in container["args"] if "endpoint_picker" in each]

    own_pod = "--set=endpoint_picker.router_endpoint=$(POD_IP):8000"
    leads = ["--set=endpoint_picker.lease.identity=$(POD_NAME)", "--set=endpoint_picker.lease.endpoint=$(POD_IP):9002"]
    assert found({}) == (None, [])
    assert found({"endpoint_picker": {}}) == (None, leads)
    assert found({"endpoint_picker": {}}, pickerLease=False) == (9002, [])
    assert found({"endpoint_picker": {}, "models": {"llama": "/models/llama"}}) == (9002, [own_pod])


def test_gateways_use_one_leading_picker(tmp_path):
    values = {"settings": {"endpoint_picker": {"lease": {"duration_seconds": 9}}}}
    found = by_name(documents(helm_3_render({"routers": values})))
    path = tmp_path / "settings.json"
    path.write_text(found["ConfigMap", "fleet-routers"]["data"]["settings.json"])
    own = {"endpoint_picker.lease.identity": "a", "endpoint_picker.lease.endpoint": "10.0.0.1:9002"}
    told = load(path, RouterSettings, own)
    lease = told.endpoint_picker.lease

    assert (lease.namespace, lease.owner, lease.duration_seconds) == ("serving", "fleet-routers", 9)
    service = found["Service", lease.service]["spec"]
    assert "selector" not in service, "the router that leads is its endpoint, by its own word"
    assert service["ports"] == [{"name": "picker", "port": 9002, "targetPort": 9002}]
    names = {name for rule in found["Role", "fleet-routers-picker"]["rules"] for name in rule.get("resourceNames", ())}
    assert names == {lease.name, lease.owner}
    pod = found["Deployment", lease.owner]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    for document in (found["Service", lease.service], found["Role", lease.name], found["RoleBinding", lease.name]):
        for version in VERSIONS:
            check(document, version)


def egress(values):
    """Return the egress rules by component, for components that have any."""
    policies = [each for each in documents(helm_3_render(values)) if each["kind"] == "NetworkPolicy"]
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["egress"]
        for each in policies
        if "Egress" in each["spec"]["policyTypes"]
    }


def ports(rules):
    """Return the ports that are open to any destination."""
    return {each["port"] for rule in rules if "to" not in rule for each in rule["ports"]}


DNS, API_SERVER = {53, 5353}, {443, 6443, 8443, 16443}


def test_restricted_pods_reach_only_what_they_need():
    assert egress({}) == {}

    found = egress(VALUES["everything"] | {"networkPolicy": {"egress": {"restricted": True}}})

    assert set(found) == {"routers", "operator", "planner", "etcd", "redis", "test"}
    for component, rules in found.items():
        assert all(rule.get("ports") or rule.get("to") for rule in rules), f"{component}: a rule that opens everything"
    assert ports(found["operator"]) == ports(found["planner"]) == DNS | API_SERVER
    assert ports(found["routers"]) == DNS | {2379, 6379}
    assert ports(found["etcd"]) == ports(found["test"]) == DNS
    assert found["redis"] == []
    to = {component: [rule["to"] for rule in rules if "to" in rule] for component, rules in found.items()}
    pods = {"podSelector": {"matchLabels": FLEETS_PODS}}
    children = {"podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "fleet-operator"}}}
    assert to["operator"] == [[pods, children | {"namespaceSelector": {}}]]
    [[routers]] = to["planner"]
    assert routers["podSelector"]["matchLabels"]["fleet-serving.io/type"] == "router"
    assert to["routers"] == [*to["operator"], [{"namespaceSelector": {}}]], "etcd says where workers are"
    assert [each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for [each] in to["test"]] == ["routers"]
    assert [each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for [each] in to["etcd"]] == ["etcd"]


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ({}, set()),
        ({"tenants_redis": "rediss://user@redis.data:6380/0"}, {6380}),
        ({"tenants_redis": "redis://redis.data"}, {6379}),
        ({"store": "store.data:50070"}, {50070}),
        ({"store": "unix:/run/store.sock"}, set()),
        ({"tracing": {"endpoint": "http://collector.observability:4317"}}, {4317}),
        ({"tracing": {"endpoint": "https://collector.example.org/v1/traces", "protocol": "http"}}, {443}),
        ({"discovery": {"kind": "etcd", "endpoints": ["etcd-0:2379", "[fd00::1]:2380"]}}, {2379, 2380}),
    ],
)
def test_routers_reach_the_ports_in_their_settings(settings, opened):
    values = {"routers": {"settings": settings}, "networkPolicy": {"egress": {"restricted": True}}}

    assert ports(egress(values)["routers"]) == DNS | opened


def test_policies_open_the_ports_of_server_urls():
    servers = [
        {"worker_id": "a", "url": "http://10.0.0.11:8000/base", "model": "m"},
        {"worker_id": "b", "url": "https://hosted.example.org", "model": "m"},
        {"worker_id": "c", "url": "http://[fd00::1]", "model": "m", "kv_events": "tcp://10.0.0.11:5557"},
    ]
    values = {"routers": {"settings": {"openai_workers": servers}}, "networkPolicy": {"egress": {"restricted": True}}}
    secret = {"routers": {"secrets": [{"setting": "tenants_redis", "name": "fleet", "key": "redis"}]}}
    picks = {"routers": {"settings": {"endpoint_picker": {}}}}

    assert ports(egress(values)["routers"]) == DNS | {8000, 443, 80, 5557}
    assert ports(egress(values | picks)["routers"]) == DNS | API_SERVER, "one of several picks, by a Lease"
    assert ports(egress(values | {"discovery": {"source": "Kubernetes"}} | secret)["routers"]) == DNS | API_SERVER | {
        6379
    }


def test_extra_peers_are_added_and_known_peers_narrowed():
    own = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 8443}]}
    extra = {component: [own] for component in ("routers", "operator", "planner", "etcd", "redis")}
    peers = {"dns": [{"ipBlock": {"cidr": "10.0.0.10/32"}}], "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    values = {"etcd": {"install": True}, "redis": {"install": True}, "discovery": {"source": "Kubernetes"}}
    values |= {"planner": {"enabled": True}}

    found = egress(values | {"networkPolicy": {"egress": {"restricted": True, "extra": extra} | peers}})

    assert all(found[component][-1] == own for component in extra)
    assert ports(found["operator"]) == ports(found["etcd"]) == set()
    assert ports(found["routers"]) == {6379}
    assert [rule["to"] for rule in found["operator"][:2]] == [peers["dns"], peers["apiServer"]]


def test_images_are_named_by_tag_or_digest():
    found = by_name(rendered("everything"))
    router = found["Deployment", "fleet-llm-routers"]["spec"]["template"]["spec"]
    operator = found["Deployment", "fleet-llm-operator"]["spec"]["template"]["spec"]

    assert router["containers"][0]["image"] == "registry.example.org/team/fleet-router:1.2.3"
    assert operator["containers"][0]["image"] == f"registry.example.org/team/fleet-operator@sha256:{'0' * 64}"
    assert router["imagePullSecrets"] == [{"name": "pull"}]
    told = msgspec.json.decode(found["ConfigMap", "fleet-llm-operator"]["data"]["settings.json"])
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert told["images"]["worker_rocm"] == f"registry.example.org/team/fleet-worker-rocm:{version}"


def test_kinds_that_a_cluster_lacks_are_left_out():
    without = rendered("default")
    with_them = rendered("default", *MONITORS)

    assert not any(each["kind"].endswith("Monitor") for each in without)
    found = by_name(with_them)
    assert found["PodMonitor", "fleet-routers"]["spec"]["podMetricsEndpoints"][0]["port"] == "health"


SCRAPE_KEY = "0" * 64


@pytest.mark.parametrize(
    ("access", "router", "other", "scraped", "sent"),
    [
        ({}, RouterMetricsAccess(), MetricsAccess(), False, None),
        ({"open": True}, RouterMetricsAccess(ask_on_health=False), MetricsAccess(open=True), True, None),
        (
            {"keySha256": [SCRAPE_KEY]},
            RouterMetricsAccess(key_sha256=(SCRAPE_KEY,)),
            MetricsAccess(key_sha256=(SCRAPE_KEY,)),
            False,
            None,
        ),
        (
            {"keySha256": [SCRAPE_KEY], "secret": {"name": "scrape"}},
            RouterMetricsAccess(key_sha256=(SCRAPE_KEY,)),
            MetricsAccess(key_sha256=(SCRAPE_KEY,)),
            True,
            {"credentials": {"name": "scrape", "key": "key"}},
        ),
    ],
    ids=["default", "open", "key-for-others", "key"],
)
def test_metrics_ask_for_a_key_unless_a_value_opens_them(access, router, other, scraped, sent):
    values = {"planner": {"enabled": True}, "monitoring": {"access": access}}
    found = by_name(documents(helm_3_render(values, *MONITORS)))

    for component, expected in (("routers", router), ("operator", other), ("planner", other)):
        told = msgspec.json.decode(found["ConfigMap", f"fleet-{component}"]["data"]["settings.json"])
        assert msgspec.convert(told.get("metrics_access", {}), type(expected)) == expected
        monitor = found.get(("PodMonitor", f"fleet-{component}"))
        assert (monitor is not None) == (scraped or component == "routers")
        if monitor is not None:
            [endpoint] = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint["port"] == ("health" if component == "routers" else "metrics")
            assert endpoint.get("authorization") == sent


@pytest.mark.parametrize("secret", ["", "metrics-tls"])
@pytest.mark.parametrize(("component", "kind"), [("operator", OperatorSettings), ("planner", KubePlannerSettings)])
def test_operator_and_planner_get_tls_from_a_secret(component, kind, secret):
    values = {"planner": {"enabled": True}, "monitoring": {"access": {"open": True, "tlsSecret": secret}}}
    found = by_name(documents(helm_3_render(values, *MONITORS)))

    told = msgspec.json.decode(found["ConfigMap", f"fleet-{component}"]["data"]["settings.json"])
    images = {"images": told["images"]} if "images" in told else {}
    tls = msgspec.convert(images | {"identity": "pod", "metrics_tls": told.get("metrics_tls", {})}, kind).metrics_tls
    pod = found["Deployment", f"fleet-{component}"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    folders = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    secrets = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert bool(tls.certificate) == bool(secret)
    if secret:
        assert secrets[folders[tls.certificate.removesuffix("/tls.crt")]] == secret
        assert tls.key == tls.certificate.replace("tls.crt", "tls.key")
    scheme = "HTTPS" if secret else None
    assert {container[f"{probe}Probe"]["httpGet"].get("scheme") for probe in ("liveness", "readiness")} == {scheme}
    [endpoint] = found["PodMonitor", f"fleet-{component}"]["spec"]["podMetricsEndpoints"]
    assert endpoint.get("scheme") == (scheme and scheme.lower())


@pytest.mark.parametrize("component", ["operator", "planner"])
def test_own_metrics_access_of_a_component_has_precedence(component):
    own = {"key_sha256": ["1" * 64]}
    values = {
        component: {"enabled": True, "settings": {"metrics_access": own}},
        "monitoring": {"access": {"open": True}},
    }
    found = by_name(documents(helm_3_render(values, *MONITORS)))

    told = msgspec.json.decode(found["ConfigMap", f"fleet-{component}"]["data"]["settings.json"])
    assert told["metrics_access"] == own
    assert ("PodMonitor", f"fleet-{component}") in found


def test_alerts_use_existing_metrics():
    kind = "--api-versions=monitoring.coreos.com/v1/PrometheusRule"
    assert ("PrometheusRule", "fleet-routers") not in by_name(rendered("default"))
    assert ("PrometheusRule", "fleet-routers") not in by_name(rendered("bare", kind))

    [group] = by_name(rendered("default", kind))["PrometheusRule", "fleet-routers"]["spec"]["groups"]
    assert [each["alert"] for each in group["rules"]] == [
        "FleetDirectoryUnreachable",
        "FleetCertificateEnds",
        "FleetCertificateRenewalRefused",
    ]
    for rule in group["rules"]:
        asked = re.findall(r"\bfleet_[a-z_]+", rule["expr"])
        assert asked
        assert set(asked) <= {each.name for each in ROUTER if each.type == "gauge"}
        assert {"summary", "description"} <= set(rule["annotations"])


def test_crds_are_the_operators_and_kept_if_configured():
    kept, gone = by_name(rendered("default")), by_name(rendered("everything"))
    for kind in KINDS:
        ours = definition(kind)
        name = ours["metadata"]["name"]
        for found, policy in ((kept, "keep"), (gone, None)):
            document = found["CustomResourceDefinition", name]
            assert document["spec"] == msgspec.json.decode(msgspec.json.encode(ours["spec"]))
            assert document["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy
    assert not any(each["kind"] == "CustomResourceDefinition" for each in rendered("bare"))


@pytest.mark.parametrize(
    ("name", "kind", "component", "access"),
    [
        ("default", "Role", "operator", ACCESS),
        ("everything", "ClusterRole", "operator", (*ACCESS, *CLUSTER_ACCESS)),
        ("brought", "Role", "planner", PLANNER_ACCESS),
        ("everything", "ClusterRole", "planner", PLANNER_ACCESS),
    ],
)
def test_chart_roles_equal_the_rights_that_the_code_needs(name, kind, component, access):
    found = [
        each
        for each in rendered(name)
        if each["kind"] in {"Role", "ClusterRole"}
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    granted = {
        (each["kind"], group, resource, verb)
        for each in found
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {
        ("Role" if each.own_namespace else kind, each.group, each.resource, verb)
        for each in access
        for verb in each.verbs
    }

    assert granted == asked
    bindings = [
        each
        for each in rendered(name)
        if each["kind"].endswith("Binding") and each["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    accounts = {each["metadata"]["name"] for each in rendered(name) if each["kind"] == "ServiceAccount"}
    assert {each["roleRef"]["name"] for each in bindings} == {each["metadata"]["name"] for each in found}
    assert all(subject["name"] in accounts for each in bindings for subject in each["subjects"])


def test_planner_may_touch_only_its_own_lease_and_one_secret():
    for name, release in (("brought", "fleet"), ("everything", "fleet-llm")):
        rules = by_name(rendered(name))["Role", f"{release}-planner-leader"]["rules"]
        named = {
            (resource, verb): rule.get("resourceNames")
            for rule in rules
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        own = [f"{release}-planner"]
        assert named == {
            ("events", "create"): None,
            ("leases", "create"): None,
            ("leases", "get"): own,
            ("leases", "update"): own,
            ("deployments", "get"): own,
            ("secrets", "get"): [OWN_SECRET],
        }
        assert LEASE_NAME not in str(rules)


def test_view_and_edit_roles_cover_our_kinds():
    found = by_name(rendered("default"))
    view, edit = (found["ClusterRole", f"serving-fleet-{name}"] for name in ("view", "edit"))
    plurals = {kind.plural for kind in KINDS}

    for role, name in ((view, "view"), (edit, "edit")):
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"
    (seen,), (edited,) = view["rules"], edit["rules"]
    assert set(seen["resources"]) == plurals | {f"{each}/status" for each in plurals} | {"rolescalers/scale"}
    assert set(edited["resources"]) == plurals | {"rolescalers/scale"}
    for values in ({"crds": {"roles": False}}, {"crds": {"install": False}}):
        assert not [kind for kind, _ in by_name(documents(helm_3_render(values))) if kind == "ClusterRole"]


@pytest.mark.parametrize(
    ("values", "where", "why"),
    [
        ({"router": {}}, "", "router"),
        ({"routers": {"replica": 1}}, "routers", "replica"),
        ({"routers": {"replicas": -1}}, "routers.replicas", "0"),
        ({"routers": {"settings": {"max_queue": 1}}}, "routers.settings", "max_queue"),
        ({"routers": {"settings": {"max_queued": "many"}}}, "routers.settings.max_queued", "integer"),
        ({"routers": {"settings": {"http_listen": "0.0.0.0:80"}}}, "routers.settings", "http_listen"),
        ({"routers": {"settings": {"tenant_secret": "hush"}}}, "routers.settings", "tenant_secret"),
        ({"operator": {"settings": {"probe": {"keys": {"a/b": "hush"}}}}}, "operator.settings.probe", "keys"),
        (
            {"routers": {"settings": {"openai_workers": [{"worker_id": "a", "url": "http://a"}]}}},
            "routers.settings.openai_workers.0",
            "model",
        ),
        (
            {"routers": {"secrets": [{"setting": "tenants", "name": "fleet"}]}},
            "routers.secrets.0",
            "key",
        ),
        ({"images": {"router": {"digest": "sha256:abc"}}}, "images.router.digest", "pattern"),
        ({"images": {"pullPolicy": "Sometimes"}}, "images.pullPolicy", "IfNotPresent"),
        (
            {"routers": {"settings": {"endpoint_picker": {"lease": {"identity": "me"}}}}},
            "routers.settings.endpoint_picker",
            "identity",
        ),
        ({"operator": {"scope": "World"}}, "operator.scope", "Cluster"),
        ({"operator": {"settings": {"at_once": 0}}}, "operator.settings.at_once", "1"),
        ({"operator": {"settings": {"identity": "me"}}}, "operator.settings", "identity"),
        ({"etcd": {"replicas": 2}}, "etcd.replicas", "5"),
        ({"tls": {"issuer": {"kind": "Anybody"}}}, "tls.issuer.kind", "ClusterIssuer"),
        ({"user": "root"}, "user", "integer"),
        ({"crds": {"install": "yes"}}, "crds.install", "boolean"),
        ({"planner": {"enable": True}}, "planner", "enable"),
        ({"planner": {"settings": {"stale_seconds": 0}}}, "planner.settings.stale_seconds", "0"),
        ({"planner": {"settings": {"control_secret": "any"}}}, "planner.settings", "control_secret"),
    ],
)
def test_both_helms_refuse_a_wrong_value_with_its_path(values, where, why):
    for said in (helm_3_render(values, code=1), _helm_4_says(values)):
        assert why in said
        for part in where.split("."):
            assert part in said


def _helm_4_says(values):
    with pytest.raises(Exception) as refused:  # noqa: PT011 - the library's own, of a module that is loaded late
        loaded_chart().validate_schema(loaded_chart().merge_values(values))
    return str(refused.value)


@pytest.mark.parametrize("number", range(len(shown_values())))
def test_documented_values_are_accepted(number):
    assert documents(helm_3_render(shown_values()[number])) != rendered("default")


def test_documented_manifests_are_accepted():
    """This test covers the kinds of Kubernetes; `test_crds` covers Fleet's own kinds."""
    shown = [each for each in shown_manifests() if not is_ours(each)]

    assert {each["kind"] for each in shown} == {"HorizontalPodAutoscaler", "Pod"}
    for version in VERSIONS:
        for each in shown:
            check(each, version)


def test_chart_can_be_a_subchart(tmp_path):
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts" / "fleet")
    (parent / "Chart.yaml").write_text("{apiVersion: v2, name: parent, version: 1.0.0}\n")

    found = by_name(documents(helm_3_render({"fleet": {"routers": {"replicas": 3}}}, chart=parent)))
    assert found["Deployment", "fleet-routers"]["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"source": "Secret"}}, "tls.secret: names the Secret"),
        (
            {"routers": {"tls": {"secret": "public", "clientAuthority": "ca.crt", "health": True}}},
            "routers.tls.health: probes of Kubernetes show no certificate",
        ),
        ({"tls": {"source": "CertManager"}}, "tls.issuer.name: names the issuer"),
        (
            {"monitoring": {"access": {"open": True, "keySha256": [SCRAPE_KEY]}}},
            "monitoring.access.open: contradicts keySha256",
        ),
        (
            {"monitoring": {"access": {"secret": {"name": "scrape"}}}},
            "monitoring.access.secret: without the SHA-256 of its key",
        ),
        ({"discovery": {"source": "Etcd"}}, "etcd.endpoints: names no etcd"),
        (
            {"discovery": {"source": "Etcd"}, "etcd": {"endpoints": ["etcd:2379"], "tls": True}},
            "etcd.tls: needs a certificate",
        ),
        (
            {"operator": {"secrets": [{"setting": "probe.keys", "name": "fleet-probes", "key": "keys.json"}]}},
            "set operator.settings.probe.insecure",
        ),
        ({"routers": {"autoscaling": {"enabled": True, "least": 3, "most": 2}}}, "least, 3, is more than most, 2"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(values, said):
    assert said in helm_3_render(values, code=1)


@pytest.mark.parametrize("name", ["default", "everything"])
def test_rendered_chart_equals_the_reviewed_one(name):
    """Custom kinds, dashboards and the rights of operator and planner are left out, because other tests check them.

    If you have changed the templates, review the difference, run `python -m tests.kube.chart.test_chart`, and commit
    its output.
    """
    assert (GOLDEN / f"chart-{name}.yaml").read_text() == reviewed(name)


def reviewed(name: str) -> str:
    found = []
    for each in rendered(name):
        if each["kind"] == "CustomResourceDefinition" or "-dashboard-" in each["metadata"]["name"]:
            continue
        if each["kind"].endswith("Role") and any(
            part in each["metadata"]["name"] for part in ("-operator", "-planner")
        ):
            each["rules"] = "operators/rbac.py"
        found.append(each)
    text = yaml.safe_dump_all(
        sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"])),
        width=120,
        default_flow_style=None,
    )
    return re.sub(r"(helm.sh/chart: |app.kubernetes.io/version: ).*", r"\1CHART", text)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in ("default", "everything"):
        (GOLDEN / f"chart-{each}.yaml").write_text(reviewed(each))
