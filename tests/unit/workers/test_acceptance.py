"""Acceptance of handoffs: blocks that this worker cannot use are refused before a byte moves, with the field that differs."""

import msgspec
import pytest

from fleet.core.errors import Reason
from fleet.core.ids import ModelName
from fleet.core.requests import (
    IMAGES,
    STATE_FIELDS,
    AnyObject,
    Pooling,
    PoolingModel,
    PoolingTask,
    Sampling,
    state_fields,
)
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import LoraAdapter
from kvstore.layouts.fingerprint import Fingerprint, describe
from tests.support.builders import a_handoff, a_start
from tests.support.kvstore.shapes import a_typed_namespace
from workers.acceptance import refusal
from workers.ports import EngineFacts

KV = describe(a_typed_namespace())
FACTS = EngineFacts(
    name="fake 1",
    model=ModelName("tiny"),
    block_tokens=16,
    max_model_len=256,
    kv_blocks=64,
    max_running=2,
    fingerprint=KV.at_rest.fingerprint,
    kv_paths=(KvPath.STORE, KvPath.DIRECT),
    kv=KV,
)


def other(**fields) -> Fingerprint:
    return msgspec.structs.replace(KV, **fields)


def handed(kv: Fingerprint | None, path: KvPath = KvPath.STORE):
    fingerprint = FACTS.fingerprint if kv is None else kv.at_rest.fingerprint
    return a_start(phase=Phase.DECODE, handoff=a_handoff(fingerprint=fingerprint, kv=kv, kv_path=path))


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "large"), ("revision", "r2"), ("dtype", "float16"), ("block_tokens", 32), ("kv_heads", 8)],
)
def test_other_kv_namespace_is_refused_naming_the_field(field, value):
    rejected = refusal(handed(other(**{field: value})), Role.DECODE, FACTS)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.KV_MISMATCH, f"handoff.kv.{field}")
    assert repr(value) in rejected.message


@pytest.mark.parametrize("kv", [other(layout="LNHD"), other(tp=4), other(layout="LNHD", tp=2)])
def test_other_layout_goes_through_the_store_but_not_directly(kv):
    assert refusal(handed(kv, KvPath.STORE), Role.DECODE, FACTS) is None

    rejected = refusal(handed(kv, KvPath.DIRECT), Role.DECODE, FACTS)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.KV_MISMATCH, "handoff.kv")
    assert f"{kv.layout} on {kv.tp} rank" in rejected.message


def test_equal_blocks_may_use_both_kv_paths():
    for path in KvPath:
        assert refusal(handed(KV, path), Role.DECODE, FACTS) is None


def test_worker_without_fingerprint_uses_the_store_only():
    assert refusal(handed(None, KvPath.STORE), Role.DECODE, FACTS) is None

    rejected = refusal(handed(None, KvPath.DIRECT), Role.DECODE, FACTS)

    assert rejected is not None
    assert "an unknown layout" in rejected.message


ADAPTED = msgspec.structs.replace(FACTS, adapters=(LoraAdapter(ModelName("ada"), "1"),), adapter_slots=1)


def test_unknown_adapter_is_refused_with_retry_elsewhere():
    rejected = refusal(a_start(adapter="bob", salt=b"s" * 32), Role.DECODE, ADAPTED)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.NO_WORKER, "adapter")
    assert refusal(a_start(adapter="ada", salt=b"s" * 32), Role.DECODE, ADAPTED) is None


def test_adapter_without_salt_is_refused():
    rejected = refusal(a_start(adapter="ada"), Role.DECODE, ADAPTED)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.INVALID_ARGUMENT, "salt")


CONTINUED = Sampling(temperature=0.0, presence_penalty=0.5, bad_tokens=((1, 2),))


def test_continuation_with_unknown_state_is_left_to_others():
    facts = msgspec.structs.replace(FACTS, sampling_fields=("bad_tokens",), continued_fields=("presence_penalty",))

    rejected = refusal(a_start(sampling=CONTINUED, generated_tokens=3), Role.BOTH, facts)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.NO_WORKER, "generated_tokens")
    assert "sampling.bad_tokens" in rejected.message


def test_continuation_with_known_state_is_taken():
    facts = msgspec.structs.replace(FACTS, sampling_fields=("bad_tokens",), continued_fields=STATE_FIELDS)

    assert refusal(a_start(sampling=CONTINUED, generated_tokens=3), Role.BOTH, facts) is None
    assert refusal(a_start(sampling=CONTINUED, generated_tokens=0), Role.BOTH, FACTS) is not None


@pytest.mark.parametrize("generated", [10, 11])
def test_continuation_needs_a_prompt(generated):
    rejected = refusal(a_start(tokens=10, generated_tokens=generated), Role.BOTH, FACTS)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.INVALID_ARGUMENT, "generated_tokens")


def test_continuation_with_state_is_no_prefill_work():
    facts = msgspec.structs.replace(FACTS, continued_fields=STATE_FIELDS)
    start = a_start(phase=Phase.PREFILL, kv_path=KvPath.STORE, generated_tokens=1, sampling=Sampling(seed=3), tokens=10)

    rejected = refusal(start, Role.BOTH, facts)

    assert rejected is not None
    assert (rejected.reason, rejected.field) == (Reason.INVALID_ARGUMENT, "generated_tokens")


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (Sampling(seed=3), ("seed",)),
        (Sampling(seed=3, temperature=0.0), ()),
        (Sampling(min_tokens=1), ()),
        (Sampling(min_tokens=2, frequency_penalty=-1.0), ("frequency_penalty", "min_tokens")),
        (Sampling(form=AnyObject(), repetition_penalty=1.5), ("repetition_penalty", "form")),
        (Sampling(prompt_logprobs=1), ()),
        (CONTINUED, ("presence_penalty", "bad_tokens")),
    ],
)
def test_fields_with_state_are_those_with_an_effect(sampling, fields):
    assert state_fields(sampling) == fields


EMBEDS = msgspec.structs.replace(FACTS, pooling=PoolingModel(task=PoolingTask.EMBED))
EMBED, CLASSIFY = Pooling(task=PoolingTask.EMBED), Pooling(task=PoolingTask.CLASSIFY)


@pytest.mark.parametrize(
    ("start", "facts", "field"),
    [
        (a_start(), EMBEDS, "pooling"),
        (a_start(pooling=EMBED), FACTS, "pooling"),
        (a_start(pooling=CLASSIFY), EMBEDS, "pooling.task"),
        (a_start(pooling=EMBED, phase=Phase.PREFILL), EMBEDS, "phase"),
        (a_start(pooling=Pooling(task=PoolingTask.EMBED, first_tokens=11)), EMBEDS, "pooling.first_tokens"),
        (a_start(pooling=EMBED, tokens=257), EMBEDS, "tokens"),
    ],
)
def test_attempt_of_another_task_is_refused_by_field(start, facts, field):
    rejected = refusal(start, Role.BOTH, facts)

    assert rejected is not None
    assert rejected.field == field


def test_prompt_for_a_vector_may_fill_the_context():
    assert refusal(a_start(pooling=EMBED, tokens=256), Role.BOTH, EMBEDS) is None


SEES = msgspec.structs.replace(FACTS, sampling_fields=(IMAGES,))


@pytest.mark.parametrize(
    ("start", "facts", "field"),
    [
        (a_start(images=(b"x",)), FACTS, "images"),
        (a_start(images=(b"x",), phase=Phase.PREFILL, kv_path=KvPath.STORE), SEES, "images"),
        (a_start(images=(b"x",)), SEES, None),
        (a_start(), FACTS, None),
    ],
)
def test_images_need_a_model_for_them_and_one_worker(start, facts, field):
    rejected = refusal(start, Role.BOTH, facts)

    assert (None if rejected is None else rejected.field) == field
