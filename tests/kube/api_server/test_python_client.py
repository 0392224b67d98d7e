"""The official Python client, which the operator uses: its lists, watches, server-side apply and leases."""

import asyncio
import json
from datetime import UTC, datetime

import pytest

from tests.support.kube.widgets import API, DEFINITION, a_deployment, a_widget

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from kubernetes.aio import client, config, dynamic, watch

from tests.support.certificates import Authority
from tests.support.kube.api.running import an_api_server

SECONDS = 60


@pytest.fixture
def server():
    with an_api_server(with_controllers=True) as server:
        yield server


@pytest.fixture
async def connection(server, tmp_path):
    async with await config.new_client_from_config(config_file=str(server.kubeconfig(tmp_path))) as connection:
        yield connection


async def test_typed_client_lists_the_created_object(connection):
    apps = client.AppsV1Api(connection)

    made = await apps.create_namespaced_deployment("default", a_deployment(replicas=2))
    listed = await apps.list_namespaced_deployment("default", label_selector="app=web")

    assert [each.metadata.uid for each in listed.items] == [made.metadata.uid]
    assert listed.items[0].spec.replicas == 2
    assert listed.items[0].metadata.creation_timestamp.tzinfo is not None


async def test_watch_continues_from_a_bookmark_or_is_too_old(server, connection):
    core = client.CoreV1Api(connection)
    start = (await core.list_namespaced_config_map("default")).metadata.resource_version
    await core.create_namespaced_config_map("default", {"metadata": {"name": "a"}})
    async with asyncio.timeout(SECONDS), watch.Watch() as watching:
        told = watching.stream(core.list_namespaced_config_map, "default", resource_version=start, timeout_seconds=1)
        assert [(event["type"], event["object"].metadata.name) async for event in told] == [("ADDED", "a")]

    server.compact()
    await core.create_namespaced_config_map("default", {"metadata": {"name": "b"}})
    async with asyncio.timeout(SECONDS), watch.Watch() as watching:
        with pytest.raises(client.exceptions.ApiException) as refused:
            async for _ in watching.stream(core.list_namespaced_config_map, "default", resource_version=start):
                pass

    assert refused.value.status == 410


async def test_the_dynamic_client_finds_custom_kinds_and_applies_them(connection):
    await client.ApiextensionsV1Api(connection).create_custom_resource_definition(DEFINITION)
    async with dynamic.DynamicClient(connection) as cluster:
        widgets = await cluster.resources.get(api_version=API, kind="Widget")

        applied = await widgets.server_side_apply(a_widget(replicas=2), namespace="default", field_manager="one")

        assert applied.spec.replicas == 2
        with pytest.raises(client.exceptions.ApiException) as refused:
            await widgets.server_side_apply(a_widget(replicas=3), namespace="default", field_manager="two")
        assert refused.value.status == 409


async def test_lease_is_renewed_by_its_last_reader(connection):
    leases = client.CoordinationV1Api(connection)
    now = datetime.now(UTC)
    spec = client.V1LeaseSpec(holder_identity="first", lease_duration_seconds=15, renew_time=now)
    made = await leases.create_namespaced_lease(
        "default", client.V1Lease(metadata=client.V1ObjectMeta(name="leader"), spec=spec)
    )
    assert made.spec.renew_time == now

    made.spec.holder_identity = "second"
    await leases.replace_namespaced_lease("leader", "default", made)
    with pytest.raises(client.exceptions.ApiException) as refused:
        await leases.replace_namespaced_lease("leader", "default", made)

    assert refused.value.status == 409


async def test_over_tls_an_account_may_do_what_its_roles_say(tmp_path):
    authority = Authority(tmp_path, "authority")
    with an_api_server(authority=authority) as server:
        kubeconfig = server.kubeconfig(tmp_path, token="system:serviceaccount:default:nobody")
        async with await config.new_client_from_config(config_file=str(kubeconfig)) as connection:
            with pytest.raises(client.exceptions.ApiException) as refused:
                await client.CoreV1Api(connection).list_namespaced_secret("default")

    assert refused.value.status == 403
    words = 'secrets is forbidden: User "system:serviceaccount:default:nobody" cannot list resource "secrets"'
    assert words in json.loads(refused.value.body)["message"]
