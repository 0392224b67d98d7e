"""Who may serve a request, and what a client is told when nobody may."""

import random

import pytest

from fleet.errors import Reason
from fleet.ids import ModelName, WorkerId
from fleet.roles import KvPath, Placement, Role
from fleet.router.candidates import Asked
from fleet.router.eligibility import Unfit
from fleet.router.impossible import Cause, Impossible, Wait
from fleet.router.placement import Placed
from fleet.router.settings import RouterSettings
from fleet.work import LoraAdapter
from tests.unit.router.rows import a_standing, decide

SETTINGS = RouterSettings(oversubscribe=1.0)
PAIRED = {"placement": Placement.DISAGGREGATED}
P = a_standing("p", Role.PREFILL)
D = a_standing("d")


def outcome(asked: dict, *standings):
    return decide(Asked(**{"prompt_tokens": 100, **asked}), standings, SETTINGS, random.Random(0))


IMPOSSIBLE = [
    (Cause.NO_WORKER, {}, [], Reason.NO_WORKER, ""),
    (Cause.ALL_DRAINING, {}, [a_standing("d", draining=True)], Reason.NO_WORKER, ""),
    (Cause.ALL_FAILED, {}, [a_standing("d", failed=True)], Reason.WORKER_LOST, ""),
    (Cause.TOO_LARGE, {}, [a_standing("d", max_model_len=50)], Reason.TOO_LARGE, "prompt"),
    (Cause.NO_PREFILL_WORKER, PAIRED, [D], Reason.NO_WORKER, "placement"),
    (Cause.NO_PAIR, PAIRED, [D, a_standing("p", Role.PREFILL, fingerprint="x")], Reason.KV_MISMATCH, "placement"),
    (Cause.NO_PATH, {**PAIRED, "kv_path": KvPath.DIRECT}, [D, P], Reason.KV_MISMATCH, "kv_path"),
    (Cause.PIN_UNKNOWN, {"pin": WorkerId("x")}, [D], Reason.INVALID_ARGUMENT, "pin"),
    (Cause.PIN_UNKNOWN, {"pin": WorkerId("p")}, [D, P], Reason.INVALID_ARGUMENT, "pin"),
    (
        Cause.PIN_UNFIT,
        {"pin": WorkerId("d")},
        [a_standing("d", draining=True), a_standing("e")],
        Reason.NO_WORKER,
        "pin",
    ),
    (Cause.NO_LABEL, {"labels": ("gold",)}, [D, a_standing("s", labels=("silver",))], Reason.NO_WORKER, "labels"),
    (Cause.NONE_AMONG, {"among": (WorkerId("x"), WorkerId("p"))}, [D, P], Reason.NO_WORKER, ""),
    (Cause.NO_ADAPTER, {"adapter": LoraAdapter(ModelName("ada"))}, [D], Reason.NO_WORKER, "model"),
    (Cause.NO_FORM, {"form": True}, [D], Reason.INVALID_ARGUMENT, "sampling.form"),
    (
        Cause.NO_FORM,
        {"form": True, "pin": WorkerId("d")},
        [D, a_standing("k", keeps_forms=True)],
        Reason.INVALID_ARGUMENT,
        "sampling.form",
    ),
    (Cause.SESSION_LOST, {"bound": WorkerId("gone"), "must_keep": True}, [D], Reason.WORKER_LOST, "session"),
]
E = a_standing("e")
OF_THOSE_THAT_MAY_BE_CHOSEN = [
    (Cause.PIN_UNKNOWN, {"pin": WorkerId("x")}),
    (Cause.PIN_UNKNOWN, {"pin": WorkerId("x"), "form": True}),
    (Cause.PIN_UNFIT, {"pin": WorkerId("e")}),
    (Cause.NO_FORM, {"form": True}),
    (Cause.SESSION_LOST, {"bound": WorkerId("gone"), "must_keep": True}),
    (Cause.NO_LABEL, {"labels": ("gold",)}),
    (Cause.NO_PREFILL_WORKER, PAIRED),
]


@pytest.mark.parametrize(("cause", "asked", "standings", "reason", "field"), IMPOSSIBLE)
def test_each_cause_has_a_code_of_its_own(cause, asked, standings, reason, field):
    refused = outcome(asked, *standings)

    assert isinstance(refused, Impossible)
    assert (refused.cause, refused.reason, refused.field) == (cause, reason, field)
    assert refused.message


@pytest.mark.parametrize(("cause", "asked"), OF_THOSE_THAT_MAY_BE_CHOSEN)
def test_the_cause_is_that_of_those_that_may_be_chosen_whatever_is_asked_besides(cause, asked):
    refused = outcome({**asked, "among": (WorkerId("d"),)}, D, E)

    assert isinstance(refused, Impossible)
    assert refused.cause is cause


def test_a_pin_on_the_only_worker_which_may_not_be_chosen_is_unfit():
    refused = outcome({"pin": WorkerId("d"), "among": (WorkerId("x"),)}, D)

    assert isinstance(refused, Impossible)
    assert refused.cause is Cause.PIN_UNFIT


def test_every_code_is_tried():
    assert {cause for cause, *_ in IMPOSSIBLE} == set(Cause)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"pin": WorkerId("full")},
        {"among": (WorkerId("full"),)},
        {"labels": ("gold",)},
        {"bound": WorkerId("full"), "must_keep": True},
    ],
)
def test_who_is_only_busy_is_waited_for(asked):
    full = a_standing("full", requests=16, labels=("gold",))

    assert outcome(asked, full) == Wait(frozenset({WorkerId("full")}))


def test_a_pin_goes_before_any_cost_and_the_others_are_told_why_not():
    placed = outcome({"pin": WorkerId("slow")}, a_standing("slow", requests=9), D)

    assert isinstance(placed, Placed)
    assert (placed.decode, dict(placed.unfit)) == ("slow", {"d": Unfit.NOT_PINNED})


def test_only_those_that_may_be_chosen_are_and_so_are_their_partners():
    slow, asked = a_standing("slow", requests=9), {"prompt_tokens": 2000}

    alone = outcome({**asked, "among": (WorkerId("slow"),)}, slow, D, P)
    paired = outcome({**asked, "among": (WorkerId("p"), WorkerId("slow"))}, slow, D, P, a_standing("q", Role.PREFILL))

    assert (alone.decode, alone.prefill, dict(alone.unfit)) == ("slow", None, {"d": Unfit.NOT_AMONG})
    assert (paired.decode, paired.prefill) == ("slow", "p")


def test_a_form_goes_to_workers_that_keep_it_however_busy_they_are():
    keeps = a_standing("k", requests=9, keeps_forms=True)

    placed = outcome({"form": True}, D, keeps)

    assert isinstance(placed, Placed)
    assert (placed.decode, dict(placed.unfit)) == ("k", {"d": Unfit.KEEPS_NO_FORM})
    assert outcome({"form": True}, D, a_standing("k", requests=16, keeps_forms=True)) == Wait(
        frozenset({WorkerId("k")})
    )


def test_a_pair_keeps_a_form_on_both_sides():
    asked = {"form": True, "prompt_tokens": 2000}
    keeps = a_standing("k", keeps_forms=True)

    alone, paired = (outcome(asked, keeps, a_standing("p", Role.PREFILL, keeps_forms=both)) for both in (False, True))

    assert (alone.decode, alone.prefill) == ("k", None)
    assert (paired.decode, paired.prefill) == ("k", "p")


def test_labels_are_all_needed():
    both = a_standing("both", requests=9, labels=("gold", "eu"))
    placed = outcome({"labels": ("gold", "eu")}, both, a_standing("one", labels=("gold",)), D)

    assert isinstance(placed, Placed)
    assert (placed.decode, dict(placed.unfit)) == ("both", {"one": Unfit.LABEL_MISSING, "d": Unfit.LABEL_MISSING})
