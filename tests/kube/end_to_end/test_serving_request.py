"""From a ServingRequest to an answered request, with the operator's deployment and real processes."""

import asyncio

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from tests.support.kube.kubelet.network import why_not

if why := why_not():
    pytest.skip(why, allow_module_level=True)

from fleet.client import Client
from fleet.hardware.known_models import known_models
from tests.kube.operator.test_serving_requests import Requests, a_request
from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.kubelet.cluster import a_cluster
from tests.support.kube.operator import AskedRouters, an_operator, install
from tests.support.waiting import until

SECONDS = 30


async def test_a_generated_deployment_serves_as_it_is(tmp_path, model_dir):
    """The deployment serves without an edit.

    The request has a pod template that selects the simulated engine, as it may set any part of a pod.
    """
    instead = {"name": "main", "args": ["--set=engine=simulated"]}
    request = a_request(
        model={"name": "tiny", "claim": "models", "uri": model_dir.name},
        modelConfig=dict(known_models()["qwen3-0.6b"].config),
        hardware={"gpu": "h100", "count": 8},
        workload={"promptTokens": 200, "answerTokens": 20, "requestsPerMinute": 60},
        podTemplate={"spec": {"containers": [instead]}},
    )
    with (
        an_api_server(with_controllers=True) as server,
        a_cluster(server, tmp_path / "cluster", claims={"models": model_dir.parent}, gpus=8) as cluster,
        Api(server.url) as api,
    ):
        install(server)
        asked = AskedRouters(server, api, "default", tmp_path)
        requests = Requests(asked)
        async with an_operator(asked):
            requests.apply(request).expect(201)
            # This operator does not run in a pod, so it cannot call routers. Workers are ready if a router knows them.
            await until(lambda: len(found := ready(asked)) == 3 and all(found.values()), SECONDS)

            answer = await asyncio.to_thread(one_answer, cluster.way_to("please-router", 50051))

            assert answer.usage.completion_tokens == 4
            made = requests.deployment()
            assert {role["name"]: role["gpus"]["perReplica"] for role in made["spec"]["roles"]} == {
                "router": 0,
                "workers": 1,
            }
            asked.api.delete(asked.path("servingrequests", "please")).expect(200)
            await until(lambda: requests.deployment() is None and not cluster.processes(), SECONDS)


def ready(asked):
    """Return whether each pod is ready, by its name."""
    return {
        name: any(
            each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", ())
        )
        for name, pod in asked.children("pods", "v1").items()
    }


def one_answer(address):
    with Client(address) as client:
        return client.complete("Say hello to everybody who is there.", max_tokens=4)
