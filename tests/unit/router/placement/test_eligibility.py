"""Eligibility: which workers may serve a request, and the rejection if none may."""

import random

import pytest

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Placement, Role
from fleet.core.work import LoraAdapter
from fleet.router.placement.candidate_table import IneligibleReason
from fleet.router.placement.decision import DecisionExplanation
from fleet.router.placement.wait_or_reject import Rejection, RejectionCause, WaitForRoom
from fleet.router.policy import PlacementRequest
from fleet.router.settings.router import RouterSettings
from tests.support.router.candidate_tables import a_candidate, decide

SETTINGS = RouterSettings(oversubscribe=1.0)
PAIRED = {"placement": Placement.DISAGGREGATED}
P = a_candidate("p", Role.PREFILL)
D = a_candidate("d")


def outcome(demand: dict, *rows):
    return decide(PlacementRequest(**{"prompt_tokens": 100, **demand}), rows, SETTINGS, random.Random(0))


IMPOSSIBLE = [
    (RejectionCause.NO_WORKER, {}, [], Reason.NO_WORKER, ""),
    (RejectionCause.ALL_DRAINING, {}, [a_candidate("d", draining=True)], Reason.NO_WORKER, ""),
    (RejectionCause.ALL_FAILED, {}, [a_candidate("d", failed=True)], Reason.WORKER_LOST, ""),
    (RejectionCause.TOO_LARGE, {}, [a_candidate("d", max_model_len=50)], Reason.TOO_LARGE, "prompt"),
    (RejectionCause.NO_PREFILL_WORKER, PAIRED, [D], Reason.NO_WORKER, "placement"),
    (
        RejectionCause.NO_PAIR,
        PAIRED,
        [D, a_candidate("p", Role.PREFILL, fingerprint="x")],
        Reason.KV_MISMATCH,
        "placement",
    ),
    (RejectionCause.NO_PATH, {**PAIRED, "kv_path": KvPath.DIRECT}, [D, P], Reason.KV_MISMATCH, "kv_path"),
    (RejectionCause.PIN_UNKNOWN, {"pin": WorkerId("x")}, [D], Reason.INVALID_ARGUMENT, "pin"),
    (RejectionCause.PIN_UNKNOWN, {"pin": WorkerId("p")}, [D, P], Reason.INVALID_ARGUMENT, "pin"),
    (
        RejectionCause.PIN_UNFIT,
        {"pin": WorkerId("d")},
        [a_candidate("d", draining=True), a_candidate("e")],
        Reason.NO_WORKER,
        "pin",
    ),
    (
        RejectionCause.NO_LABEL,
        {"labels": ("gold",)},
        [D, a_candidate("s", labels=("silver",))],
        Reason.NO_WORKER,
        "labels",
    ),
    (RejectionCause.NONE_AMONG, {"among": (WorkerId("x"), WorkerId("p"))}, [D, P], Reason.NO_WORKER, ""),
    (RejectionCause.NO_ADAPTER, {"adapter": LoraAdapter(ModelName("ada"))}, [D], Reason.NO_WORKER, "model"),
    (RejectionCause.OTHER_WEIGHTS, {"fingerprint": "x"}, [D], Reason.WORKER_LOST, ""),
    (
        RejectionCause.LOSES_STATE,
        {"continues": ("seed", "form")},
        [D, a_candidate("k", continued_fields=("seed",))],
        Reason.WORKER_LOST,
        "",
    ),
    (RejectionCause.NO_FORM, {"form": True}, [D], Reason.INVALID_ARGUMENT, "sampling.form"),
    (
        RejectionCause.NO_FORM,
        {"form": True, "pin": WorkerId("d")},
        [D, a_candidate("k", keeps_forms=True)],
        Reason.INVALID_ARGUMENT,
        "sampling.form",
    ),
    (
        RejectionCause.NO_FIELD,
        {"needs": ("logit_bias", "prompt_logprobs")},
        [a_candidate("d", sampling_fields=("logit_bias",))],
        Reason.INVALID_ARGUMENT,
        "sampling.prompt_logprobs",
    ),
    (
        RejectionCause.NO_FIELD,
        {"needs": ("logit_bias",), "pin": WorkerId("d")},
        [D, a_candidate("k", sampling_fields=("logit_bias",))],
        Reason.INVALID_ARGUMENT,
        "sampling.logit_bias",
    ),
    (RejectionCause.NO_FIELD, {"needs": ("images",)}, [D], Reason.INVALID_ARGUMENT, "chat.messages"),
    (RejectionCause.SESSION_LOST, {"bound": WorkerId("gone"), "must_keep": True}, [D], Reason.WORKER_LOST, "session"),
]
E = a_candidate("e")
OF_THOSE_THAT_MAY_BE_CHOSEN = [
    (RejectionCause.PIN_UNKNOWN, {"pin": WorkerId("x")}),
    (RejectionCause.PIN_UNKNOWN, {"pin": WorkerId("x"), "form": True}),
    (RejectionCause.PIN_UNFIT, {"pin": WorkerId("e")}),
    (RejectionCause.NO_FORM, {"form": True}),
    (RejectionCause.SESSION_LOST, {"bound": WorkerId("gone"), "must_keep": True}),
    (RejectionCause.NO_LABEL, {"labels": ("gold",)}),
    (RejectionCause.NO_PREFILL_WORKER, PAIRED),
]


@pytest.mark.parametrize(("cause", "demand", "rows", "reason", "field"), IMPOSSIBLE)
def test_each_rejection_has_its_cause(cause, demand, rows, reason, field):
    refused = outcome(demand, *rows)

    assert isinstance(refused, Rejection)
    assert (refused.cause, refused.reason, refused.field) == (cause, reason, field)
    assert refused.message


@pytest.mark.parametrize(("cause", "demand"), OF_THOSE_THAT_MAY_BE_CHOSEN)
def test_cause_ignores_workers_outside_the_allowed_list(cause, demand):
    refused = outcome({**demand, "among": (WorkerId("d"),)}, D, E)

    assert isinstance(refused, Rejection)
    assert refused.cause is cause


SMALL, DRAINS = a_candidate("s", max_model_len=50), a_candidate("e", draining=True)
GOLD_SMALL = a_candidate("s", max_model_len=50, labels=("gold",))


@pytest.mark.parametrize(
    ("cause", "demand", "rows", "message"),
    [
        (RejectionCause.ALL_DRAINING, {}, [SMALL, DRAINS], "all workers that may serve the request are draining"),
        (
            RejectionCause.ALL_DRAINING,
            {"labels": ("gold",)},
            [GOLD_SMALL, D, a_candidate("e", labels=("gold",), draining=True)],
            "all workers that may serve the request are draining",
        ),
        (RejectionCause.ALL_FAILED, {}, [SMALL, a_candidate("e", failed=True)], "has failed"),
        (RejectionCause.TOO_LARGE, {}, [SMALL, a_candidate("e", max_model_len=60, draining=True)], "(longest: 60)"),
        (RejectionCause.TOO_LARGE, {"labels": ("gold",)}, [GOLD_SMALL, D], "(longest: 50)"),
        (RejectionCause.TOO_LARGE, {"pin": WorkerId("s")}, [SMALL, D], "(longest: 50)"),
    ],
)
def test_length_is_the_cause_only_if_no_suitable_worker_fits(cause, demand, rows, message):
    refused = outcome(demand, *rows)

    assert isinstance(refused, Rejection)
    assert refused.cause is cause
    assert message in refused.message


@pytest.mark.parametrize(("demand", "other"), [({}, DRAINS), ({"labels": ("gold",)}, E)])
def test_failure_names_only_workers_that_may_serve(demand, other):
    refused = outcome(demand, a_candidate("d", failed=True, labels=("gold",)), other)

    assert isinstance(refused, Rejection)
    assert refused.message == "every worker that may serve the request now has failed it"


def test_unknown_pin_is_quoted_in_its_error():
    refused = outcome({"pin": WorkerId("nobody")}, D)

    assert isinstance(refused, Rejection)
    assert refused.message.startswith("pin: no worker 'nobody' answers requests for this model")


def test_pin_outside_the_allowed_list_is_unfit():
    refused = outcome({"pin": WorkerId("d"), "among": (WorkerId("x"),)}, D)

    assert isinstance(refused, Rejection)
    assert refused.cause is RejectionCause.PIN_UNFIT


def test_every_cause_is_tested():
    by_machine = {RejectionCause.PASSED_ON}  # only for answers that have begun: tests/unit/router/test_machine.py
    assert {cause for cause, *_ in IMPOSSIBLE} == set(RejectionCause) - by_machine


@pytest.mark.parametrize(
    "demand",
    [
        {},
        {"pin": WorkerId("full")},
        {"among": (WorkerId("full"),)},
        {"labels": ("gold",)},
        {"bound": WorkerId("full"), "must_keep": True},
    ],
)
def test_request_waits_if_a_worker_is_only_busy(demand):
    full = a_candidate("full", requests=16, labels=("gold",))

    assert outcome(demand, full) == WaitForRoom(frozenset({WorkerId("full")}))


def test_pin_overrides_cost_and_is_explained():
    placed = outcome({"pin": WorkerId("slow")}, a_candidate("slow", requests=9), D)

    assert isinstance(placed, DecisionExplanation)
    assert (placed.decode, dict(placed.unfit)) == ("slow", {"d": IneligibleReason.NOT_PINNED})


def test_allowed_list_limits_both_workers_of_a_pair():
    slow, demand = a_candidate("slow", requests=9), {"prompt_tokens": 2000}

    alone = outcome({**demand, "among": (WorkerId("slow"),)}, slow, D, P)
    paired = outcome({**demand, "among": (WorkerId("p"), WorkerId("slow"))}, slow, D, P, a_candidate("q", Role.PREFILL))

    assert (alone.decode, alone.prefill, dict(alone.unfit)) == ("slow", None, {"d": IneligibleReason.NOT_AMONG})
    assert (paired.decode, paired.prefill) == ("slow", "p")


def test_structured_output_goes_to_supporting_workers():
    keeps = a_candidate("k", requests=9, keeps_forms=True)

    placed = outcome({"form": True}, D, keeps)

    assert isinstance(placed, DecisionExplanation)
    assert (placed.decode, dict(placed.unfit)) == ("k", {"d": IneligibleReason.KEEPS_NO_FORM})
    assert outcome({"form": True}, D, a_candidate("k", requests=16, keeps_forms=True)) == WaitForRoom(
        frozenset({WorkerId("k")})
    )


def test_sampling_fields_go_to_workers_that_obey_them():
    obeys = a_candidate("k", requests=9, sampling_fields=("logit_bias",))

    placed = outcome({"needs": ("logit_bias",)}, D, obeys)

    assert isinstance(placed, DecisionExplanation)
    assert (placed.decode, dict(placed.unfit)) == ("k", {"d": IneligibleReason.LACKS_FIELD})


def test_both_workers_of_a_pair_support_structured_output():
    demand = {"form": True, "prompt_tokens": 2000}
    keeps = a_candidate("k", keeps_forms=True)

    alone, paired = (outcome(demand, keeps, a_candidate("p", Role.PREFILL, keeps_forms=both)) for both in (False, True))

    assert (alone.decode, alone.prefill) == ("k", None)
    assert (paired.decode, paired.prefill) == ("k", "p")


def test_worker_needs_all_demanded_labels():
    both = a_candidate("both", requests=9, labels=("gold", "eu"))
    placed = outcome({"labels": ("gold", "eu")}, both, a_candidate("one", labels=("gold",)), D)

    assert isinstance(placed, DecisionExplanation)
    assert (placed.decode, dict(placed.unfit)) == (
        "both",
        {"one": IneligibleReason.LABEL_MISSING, "d": IneligibleReason.LABEL_MISSING},
    )
