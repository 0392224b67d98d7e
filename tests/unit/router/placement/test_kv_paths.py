"""Workers with different block layouts: their common KV paths, and the cost of converting blocks."""

import msgspec
import pytest

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.roles import KvPath, Role
from fleet.router.messages import StoreChanged
from fleet.router.placement.decision import common_path
from fleet.router.settings.router import RouterSettings
from kvstore.block import chain
from kvstore.layouts.fingerprint import describe
from tests.support.builders import BLOCK_TOKENS, FINGERPRINT, STORE, a_description, a_prompt, an_arrival
from tests.support.kvstore.shapes import a_typed_namespace
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, dispatched, the

SETTINGS = RouterSettings(prefer_direct=True, conversion_cost=0.25, store_hit_credit=0.75)
AT_REST = describe(a_typed_namespace())
NHD = msgspec.structs.replace(AT_REST, layout="LNHD")
TP_2 = msgspec.structs.replace(AT_REST, tp=2)
BOTH = (KvPath.STORE, KvPath.DIRECT)


def a_worker(kv, **fields):
    return a_description(kv=kv, kv_paths=BOTH, **fields)


@pytest.mark.parametrize(
    ("prefill", "decode", "path"),
    [
        (AT_REST, AT_REST, KvPath.DIRECT),
        (NHD, NHD, KvPath.DIRECT),
        (NHD, AT_REST, KvPath.STORE),
        (TP_2, AT_REST, KvPath.STORE),
        (AT_REST, TP_2, KvPath.STORE),
        (None, None, KvPath.DIRECT),
        (None, AT_REST, KvPath.STORE),
    ],
)
def test_different_layouts_use_the_store_path(prefill, decode, path):
    assert common_path(a_worker(prefill), a_worker(decode), None, SETTINGS) is path


def test_different_layouts_have_no_path_without_a_store():
    assert common_path(a_worker(NHD, store_id=None), a_worker(AT_REST, store_id=None), None, SETTINGS) is None
    assert common_path(a_worker(NHD), a_worker(AT_REST), KvPath.DIRECT, SETTINGS) is None


def test_conversion_lowers_the_hit_credit():
    router = RouterMachineDriver(conversion_cost=0.25, store_hit_credit=0.75)
    router.join("plain", kv=AT_REST)
    router.join("converts", kv=NHD)
    prompt = a_prompt(10 * BLOCK_TOKENS)
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=tuple(chain(prompt, BLOCK_TOKENS))))

    work = the(Dispatch, router.send(an_arrival(tokens=prompt)))

    assert work.worker_id == "plain"
    explained = router.machine.explain(RequestId("r1"))
    assert explained is not None
    credits_ = {terms.worker_id: -terms.parts["credit"] for terms in explained.placements[-1].candidates}
    assert credits_ == {"plain": 7.5, "converts": 5.0}


def test_kv_mismatch_rejections_are_counted():
    router = RouterMachineDriver(("d1", Role.DECODE), ("d2", Role.DECODE))
    work = the(Dispatch, router.send(an_arrival()))

    router.reject(work, Reason.KV_MISMATCH, "handoff.kv.dtype")

    assert router.machine.snapshot().counters.kv_mismatches == 1


def test_dispatch_carries_the_session():
    router = RouterMachineDriver(("d1", Role.DECODE))

    assert dispatched(router.send(an_arrival(session="agent-7"))).session == "agent-7"
