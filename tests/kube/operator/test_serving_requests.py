"""ServingRequests with an operator: it makes a deployment of each, or reports why that is impossible."""

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

import msgspec

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.api.serving_request import ServingRequestSpec
from operators.controller.serving_request import proposed
from operators.proposals import LARGEST, Proposal, propose
from tests.kube.chart.test_crds import refusal
from tests.support.kube.documentation import shown_manifests
from tests.support.kube.operator import an_operator
from tests.support.waiting import until
from tests.unit.operators.test_proposals import FEASIBLE, filled
from tests.unit.operators.test_proposals import asked as asking

IMPOSSIBLE = {"ttftMs": 1, "tpotMs": 1}
APART = {"ttftMs": 1000, "tpotMs": 20}


def a_request(name="please", **changes):
    spec = {
        "model": {"name": "llama", "uri": "meta-llama/Llama-3.3-70B-Instruct"},
        "hardware": {"gpu": "h100", "count": 32, "product": "NVIDIA-H100-80GB-HBM3"},
        "workload": {"promptTokens": 2048, "answerTokens": 256, "requestsPerMinute": 600},
        "objective": {"ttftMs": 1000, "tpotMs": 50},
        "apply": True,
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "ServingRequest",
        "metadata": {"name": name},
        "spec": spec | changes,
    }


class Requests:
    """Reads and writes a test's requests on the API server."""

    def __init__(self, asked):
        self._asked = asked

    def apply(self, manifest):
        name = manifest["metadata"]["name"]
        return self._asked.api.apply(self._asked.path("servingrequests", name), manifest, "somebody", force="true")

    def status(self, name="please"):
        return self._asked.api.get(self._asked.path("servingrequests", name)).expect(200).get("status", {})

    def conditions(self, name="please"):
        """Return the conditions of its current generation; nothing while the status is of an earlier one."""
        found = self._asked.api.get(self._asked.path("servingrequests", name)).expect(200)
        generation = found["metadata"]["generation"]
        said = found.get("status", {}).get("conditions", ())
        return {
            each["type"]: (each["status"], each["reason"]) for each in said if each["observedGeneration"] == generation
        }

    def deployment(self, name="please"):
        found = self._asked.api.get(self._asked.path("disaggdeployments", name))
        return found.body if found.code == 200 else None


@pytest.fixture
def requests(asked):
    return Requests(asked)


def roles(deployment):
    return {role["name"]: role["replicas"] for role in deployment["spec"]["roles"]}


async def test_request_becomes_a_ready_deployment_and_owns_it(asked, requests):
    async with an_operator(asked):
        requests.apply(a_request()).expect(201)
        await until(lambda: requests.conditions().get("Ready") == ("True", "AllRolesReady"))

        status, made = requests.status(), requests.deployment()
        assert (status["phase"], status["deployment"], status["observedGeneration"]) == ("Ready", "please", 1)
        assert status["proposal"]["spec"]["roles"][1]["replicas"] == 3
        assert {each["goal"]: each["met"] for each in status["figures"]} == dict.fromkeys(
            ("ttftMs", "tpotMs", "gpus", "requestsPerMinute"), True
        )
        assert roles(made) == {"router": 2, "workers": 3}
        assert asked.replicas() == {"workers": 3}
        written = [each for each in asked.writes() if each[1] in ("disaggdeployments", "servingrequests/status")]
        assert [each for each in written if each[1] == "disaggdeployments"] in (
            [("patch", "disaggdeployments", "please")],
            [("create", "disaggdeployments", "please")],
        )
        assert len(written) <= 5, written

        asked.api.delete(asked.path("servingrequests", "please")).expect(200)
        await until(lambda: requests.deployment() is None and not asked.workers())


async def test_infeasible_request_is_a_condition_only(asked, requests):
    cases = {
        "slow": ({"objective": IMPOSSIBLE}, "TtftOutOfReach"),
        "few": ({"hardware": {"gpu": "h100", "count": 8}, "objective": APART}, "TooFewGpus"),
        "large": ({"hardware": {"gpu": "h100", "count": 1}}, "ModelDoesNotFit"),
        "nobody": ({"model": {"name": "nobody/knows-this"}}, "ModelUnknown"),
        "nothing": ({"hardware": {"gpu": "nothing", "count": 8}}, "GpuUnknown"),
    }
    async with an_operator(asked):
        for name, (changes, _) in cases.items():
            requests.apply(a_request(name, **changes)).expect(201)
        for name, (_, reason) in cases.items():
            await until(lambda name=name, reason=reason: requests.conditions(name).get("Feasible") == ("False", reason))
            assert requests.conditions(name)["Ready"] == ("False", reason)
            assert requests.status(name)["phase"] == "Infeasible"
            assert requests.deployment(name) is None
        figure = requests.status("slow")["figures"][0]
        assert (figure["goal"], figure["asked"], figure["met"]) == ("ttftMs", 1, False)

        requests.apply(a_request("slow")).expect(200)
        await until(lambda: requests.conditions("slow").get("Applied") == ("True", "Applied"))


async def test_changed_request_changes_only_its_own_deployment(asked, requests):
    async with an_operator(asked):
        for name in ("please", "other"):
            requests.apply(a_request(name)).expect(201)
        await until(
            lambda: all(requests.conditions(name).get("Ready", ("",))[0] == "True" for name in ("please", "other"))
        )
        before = requests.deployment("other")["metadata"]["generation"]

        requests.apply(a_request(objective=APART)).expect(200)
        await until(
            lambda: (
                requests.conditions().get("Ready", ("",))[0] == "True"
                and roles(requests.deployment()) == {"router": 2, "prefill": 2, "decode": 1}
            )
        )
        await until(lambda: asked.ready("please") and asked.ready("other"))

        assert requests.deployment("other")["metadata"]["generation"] == before
        requests.apply(a_request(objective=IMPOSSIBLE)).expect(200)
        await until(lambda: requests.conditions().get("Feasible", ("",))[0] == "False")
        assert roles(requests.deployment()) == {"router": 2, "prefill": 2, "decode": 1}
        requests.apply(a_request(apply=False)).expect(200)
        await until(lambda: requests.conditions().get("Applied") == ("False", "NotAskedFor"))
        assert roles(requests.deployment()) == {"router": 2, "prefill": 2, "decode": 1}


async def test_role_added_by_others_is_kept(asked, requests):
    async with an_operator(asked) as operator:
        requests.apply(a_request()).expect(201)
        await until(lambda: requests.conditions().get("Ready") == ("True", "AllRolesReady"))

        asked.apply(
            requests.deployment()
            | {"spec": {"roles": [{"name": "extra", "type": "aggregated"}]}}
            | {"metadata": {"name": "please"}}
        ).expect(200)
        await until(lambda: asked.replicas() == {"workers": 3, "extra": 1} and asked.ready("please"))
        generation = requests.deployment()["metadata"]["generation"]
        requests.apply(a_request(objective=APART)).expect(200)
        await until(lambda: asked.replicas() == {"prefill": 2, "decode": 1, "extra": 1})
        await until(lambda: asked.ready("please"))
        # The status of the request follows that of its deployment.
        await until(lambda: requests.conditions().get("Ready") == ("True", "AllRolesReady") and not operator.waiting())

        assert roles(requests.deployment()) == {"router": 2, "prefill": 2, "decode": 1, "extra": 1}
        assert requests.deployment()["metadata"]["generation"] <= generation + 3
        asked.server.forget_requests()
        operator.enqueue_all()
        await until(lambda: not operator.waiting())
        assert asked.writes() == [], "roles are in another order on the server"


async def test_proposal_can_be_applied_by_hand(asked, requests):
    async with an_operator(asked) as operator:
        requests.apply(a_request(apply=False)).expect(201)
        await until(lambda: requests.conditions().get("Proposed") == ("True", "Proposed"))
        assert requests.deployment() is None

        asked.apply(requests.status()["proposal"]).expect(201)
        await until(lambda: asked.ready("please"))

        requests.apply(a_request(objective=APART)).expect(200)
        await until(lambda: requests.conditions().get("Applied") == ("False", "NameTaken"))
        assert roles(requests.deployment()) == {"router": 2, "workers": 3}
        assert requests.status().get("deployment", "") == ""

        await until(lambda: not operator.waiting())  # so that only the deletion can wake it
        asked.api.delete(asked.path("disaggdeployments", "please")).expect(200)
        await until(lambda: (made := requests.deployment()) and "decode" in roles(made))


def test_every_proposal_fits_schema_and_rules(asked):
    for number, changes in enumerate(FEASIBLE):
        got = propose(asking(**changes))
        assert isinstance(got, Proposal)
        made = proposed(f"proposal-{number}", got)
        asked.api.post(asked.path("disaggdeployments"), made, fieldValidation="Strict").expect(201)


@pytest.mark.parametrize("name", ["a" * 48, "llama-3.3", "1a"])
def test_request_with_an_impossible_name_is_refused(asked, name):
    said = refusal(asked.api.post(asked.path("servingrequests"), a_request(name)))
    assert "metadata.name: the deployment and its Services are called after it" in said


def test_documented_request_is_the_sample_and_feasible():
    """`test_crds` checks that the API server accepts the documented request."""
    documented, sample = (each for each in shown_manifests() if each["kind"] == "ServingRequest")

    got = propose(msgspec.convert(sample["spec"], ServingRequestSpec))

    assert documented == sample
    assert isinstance(got, Proposal)
    assert got.reason == "GoalsMet"


ETCD_BYTES = 3 << 19


async def test_longest_template_fits_etcd_and_longer_is_refused(asked, requests):
    def sizes():
        found = [asked.api.get(asked.path(kind, "please")).body for kind in ("servingrequests", "disaggdeployments")]
        return [len(msgspec.json.encode(each)) for each in found]

    async with an_operator(asked):
        # With many short fields, their ownership takes more room than the fields.
        requests.apply(a_request(objective=APART, podTemplate=filled(LARGEST, fields=4000))).expect(201)
        await until(lambda: requests.conditions().get("Applied") == ("True", "Applied"))
        assert len(roles(requests.deployment())) == 3
        assert max(sizes()) < ETCD_BYTES

        requests.apply(a_request(objective=APART, podTemplate=filled(500_000))).expect(200)
        await until(lambda: requests.conditions().get("Feasible") == ("False", "SpecificationRefused"))
        status = requests.status()
        assert "spec.podTemplate: takes 500,000 bytes" in status["conditions"][0]["message"]
        assert "proposal" not in status or not status["proposal"]
        assert requests.deployment() is not None, "it stays as it was made before"
        assert sizes()[0] < ETCD_BYTES
