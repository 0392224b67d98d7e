"""Translation of the block hashes in engines' KV events, recorded and made-up ones, to Fleet's block hashes."""

import msgspec
import pytest

from fleet.backends.kv_events.formats import UnreadableEngineEvent
from fleet.backends.kv_events.translator import SkipReason
from fleet.core.work import KvCleared, KvRemoved, KvStored
from fleet.frontend.openai.prompt_keys import client_salt
from tests.unit.backends.kv_events.published import (
    BLOCK_TOKENS,
    PAGE_TOKENS,
    SALT,
    SGLANG,
    VLLM,
    a_batch,
    names,
    of_group,
    removed,
    some_books,
    stored,
)

FIRST, LONGER, SALTED, PUSHING, RESET = VLLM


# Recorded events of vLLM.


def test_recorded_vllm_events_name_the_prompts_blocks():
    books = some_books()

    assert books.take(FIRST) == [KvStored(names(100, 170))]
    assert books.take(LONGER) == [KvStored(names(100, 230)[2:])]
    assert books.take(SALTED) == [KvStored(names(100, 170, SALT))]


def test_recorded_vllm_removals_name_stored_blocks():
    books = some_books()
    for batch in (FIRST, LONGER, SALTED):
        books.take(batch)

    events = books.take(PUSHING)

    assert events[:-1] == [KvRemoved((name,)) for name in reversed(names(100, 230))]
    assert events[-1] == KvStored(names(1000, 1200))
    assert books.take(RESET) == [KvCleared()]
    assert len(books) == 0


def test_blocks_after_an_unknown_parent_are_skipped():
    books = some_books()

    assert books.take(LONGER) == []
    assert books.passed_over == {SkipReason.UNKNOWN_PARENT: 2}
    assert books.take(PUSHING) == [KvStored(names(1000, 1200))], "removals of unknown blocks are nothing"


# Recorded events of SGLang.


def test_recorded_sglang_events_name_the_prompts_blocks():
    books = some_books(100, PAGE_TOKENS, salt_of=client_salt)
    tenant, adapter = client_salt("", "tenant-a"), client_salt("adapter-one", "")

    told = [books.take(batch) for batch in SGLANG]

    assert told == [
        [KvStored(names(100, 164, b"", PAGE_TOKENS))],
        [KvStored(names(100, 228, b"", PAGE_TOKENS)[4:])],
        [KvStored(names(100, 164, tenant, PAGE_TOKENS))],
        [KvStored(names(100, 164, adapter, PAGE_TOKENS))],
        [KvRemoved(names(100, 228, b"", PAGE_TOKENS)[4:])],
        [KvRemoved(names(100, 164, b"", PAGE_TOKENS)), KvStored(names(1000, 1064, b"", PAGE_TOKENS))],
        [KvCleared()],
    ]
    assert books.passed_over == {SkipReason.OTHER_TIER: 4}, "what went to pinned memory is not in the GPU's"


class _SglangEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """An event in the form in which SGLang published events until 0.5.19, by its schema."""


class BlockStored(_SglangEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(_SglangEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_SglangEvent):
    pass


def test_array_events_of_older_releases_are_read():
    books = some_books()
    one, other = names(100, 164)

    batch = a_batch(
        BlockStored([-1, 2], None, list(range(100, 164)), BLOCK_TOKENS, None), BlockRemoved([2]), AllBlocksCleared()
    )

    assert books.take(batch) == [KvStored((one, other)), KvRemoved((other,)), KvCleared()]


def test_array_events_of_older_vllm_releases_are_read():
    books = some_books()
    one, other = names(100, 164)

    events = books.take(
        a_batch(
            ["BlockStored", [b"1", b"2"], None, list(range(100, 164)), BLOCK_TOKENS, None, "GPU", None, None, 0],
            ["BlockRemoved", [b"2"], "GPU", 0],
            ["AllBlocksCleared"],
        )
    )

    assert events == [KvStored((one, other)), KvRemoved((other,)), KvCleared()]


# Fields and kinds of events that vLLM or SGLang may add later.


def test_unknown_fields_and_kinds_are_skipped():
    books = some_books()
    newer = stored([1], None, 0, 32, session_id="s", locality="LOCAL", of_next_year={"a": [1]})

    payload = msgspec.msgpack.encode([0.0, [{"type": "BlockPolished", "x": 1}, ["BlockMoved", 7], newer], 0, "more"])

    assert books.take(payload) == [KvStored(names(0, 32))]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1 no msgpack",
        msgspec.msgpack.encode({"ts": 0}),
        msgspec.msgpack.encode([0.0, ["BlockStored"]]),
        a_batch({"block_hashes": [1]}),
        a_batch({"type": "BlockStored", "block_hashes": [1]}),
        a_batch(stored("none", None, 0, 32)),
        a_batch(stored([1], None, 0, 31)),
        a_batch(stored([1], None, 0, 32, token_ids=["a"] * 32)),
        a_batch(stored([1], None, 0, 32, token_ids=[2**32] * 32)),
        a_batch(stored([1], None, 0, 32, token_ids=[-1] * 32)),
        a_batch(stored([1], None, 0, 32, extra_keys=[None, None])),
        a_batch({"type": "BlockRemoved"}),
        b"\x91" * 100_000,
    ],
)
def test_unreadable_batch_raises_and_changes_nothing(payload):
    with pytest.raises(UnreadableEngineEvent):
        some_books().take(payload)


def test_name_is_removed_with_its_last_copy():
    books = some_books()
    (name,) = names(0, 32)

    assert books.take(a_batch(stored([7], None, 0, 32))) == [KvStored((name,))]
    assert books.take(a_batch(stored([7], None, 0, 32))) == []
    assert books.take(a_batch(removed(7))) == []
    assert books.take(a_batch(removed(7))) == [KvRemoved((name,))]


def test_name_with_two_engine_hashes_is_removed_with_the_second():
    books = some_books()
    (name,) = names(0, 32)

    assert books.take(a_batch(stored([7], None, 0, 32), stored([8], None, 0, 32))) == [KvStored((name,))]
    assert books.take(a_batch(removed(7))) == []
    assert books.take(a_batch(removed(8))) == [KvRemoved((name,))]
    books.take(a_batch(stored([7], None, 0, 32), {"type": "AllBlocksCleared"}))
    assert books.take(a_batch(stored([9], None, 0, 32))) == [KvStored((name,))]


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ({"medium": "CPU"}, SkipReason.OTHER_TIER),
        ({"lora_id": 1}, SkipReason.NAMELESS_ADAPTER),
        ({"block_size": 16}, SkipReason.OTHER_BLOCK_SIZE),
        ({"extra_keys": [[["image", 0]]]}, SkipReason.NOT_ONLY_TOKENS),
        ({"extra_keys": [["not a salt"]]}, SkipReason.NOT_ONLY_TOKENS),
        ({"extra_keys": [["z" * 64]]}, SkipReason.NOT_ONLY_TOKENS),
        ({"extra_keys": [["ab" * 32, "embeddings"]]}, SkipReason.NOT_ONLY_TOKENS),
        ({"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter"]]}, SkipReason.NOT_ONLY_TOKENS),
        ({"token_ids": [(n, n + 1) for n in range(32)]}, SkipReason.NOT_ONLY_TOKENS),
    ],
    ids=["tier", "nameless", "size", "image", "strange salt", "no hex", "two keys", "unsalted adapter", "pairs"],
)
def test_unnamable_blocks_are_skipped_and_counted(foreign, why):
    books = some_books()

    assert books.take(a_batch(stored([7], None, 0, 32, **foreign))) == []
    assert books.take(a_batch(stored([8], 7, 32, 64))) == []
    assert books.passed_over == {why: 1, SkipReason.UNKNOWN_PARENT: 1}


def test_text_before_an_image_is_followed():
    books = some_books()
    keys = [None, None, [["image", 70]], [["image", -26]]]

    assert books.take(a_batch(stored([1, 2, 3, 4], None, 0, 128, extra_keys=keys))) == [KvStored(names(0, 64))]
    assert books.take(a_batch(stored([5], 4, 128, 160))) == []
    assert books.take(a_batch(stored([6], 2, 64, 96))) == [KvStored(names(0, 96)[2:])]
    assert books.passed_over == {SkipReason.NOT_ONLY_TOKENS: 2, SkipReason.UNKNOWN_PARENT: 1}
    assert books.followed == 3


def test_partial_block_does_not_count_as_other_block_size():
    books = some_books()
    books.take(a_batch(stored([1], None, 0, 32)))

    books.take(a_batch(stored([2], 1, 32, 40, block_size=8)))

    assert books.passed_over == {SkipReason.PART_OF_A_BLOCK: 1}


def test_more_blocks_than_capacity_clear_the_cache():
    books = some_books(capacity=2)

    assert books.take(a_batch(stored([1, 2, 3], None, 0, 96))) == [KvCleared()]
    assert len(books) == 0


# Adapters and salts.


def test_different_adapters_and_salts_never_share_a_name():
    told = [("", ""), ("a", ""), ("b", ""), ("", "a"), ("", "b"), ("a", "a"), ("b", "a"), ("a", "b")]
    mine: list[bytes] = []
    for number, (adapter, salt) in enumerate(told):
        books = some_books(salt_of=client_salt)
        lora = {"lora_id": number, "lora_name": adapter} if adapter else {}
        keys = [key for key in (adapter, salt) if key]
        (event,) = books.take(a_batch(stored([1], None, 0, 32, extra_keys=[keys or None], **lora)))
        mine += event.hashes

    assert len(set(mine)) == len(told)


def test_router_salt_covers_the_adapter():
    books = some_books()
    fields = {"lora_id": 1, "lora_name": "ada", "extra_keys": [["ada", SALT.hex()], ["ada"]]}

    assert books.take(a_batch(stored([1, 2], None, 0, 64, **fields))) == [KvStored(names(0, 64, SALT))]


# Groups of layers.


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("sliding_window", SkipReason.SLIDING_WINDOW),
        ("sliding_window_mla", SkipReason.SLIDING_WINDOW),
        ("chunked_local_attention", SkipReason.CHUNKED_ATTENTION),
        ("mamba", SkipReason.MAMBA),
        ("cross_attention", SkipReason.OTHER_ATTENTION),
        ("of_next_year", SkipReason.OTHER_ATTENTION),
    ],
)
def test_other_attention_is_skipped_by_its_reason(attention, why):
    books = some_books()

    assert books.take(a_batch(of_group(1, attention, [1, 2], None, 0, 64))) == []
    assert books.passed_over == {why: 2}


def test_hybrid_model_is_followed_by_its_full_attention_group():
    books = some_books()
    name, other = names(0, 64)

    assert books.take(a_batch(of_group(0, "sliding_window", [2], None, 0, 64))) == [], (
        "masked: fewer hashes than blocks"
    )
    assert books.take(a_batch(of_group(1, "full_attention", [1, 2], None, 0, 64))) == [KvStored((name, other))]
    assert books.take(a_batch(removed(1, group_idx=0), removed(2, group_idx=0))) == [], "the window moved on"
    assert books.take(a_batch(removed(2, group_idx=1))) == [KvRemoved((other,))]


def test_second_full_attention_group_adds_no_copies():
    books = some_books()
    (name,) = names(0, 32)
    books.take(
        a_batch(of_group(0, "full_attention", [1], None, 0, 32), of_group(1, "full_attention", [1], None, 0, 32))
    )

    assert books.passed_over == {SkipReason.OTHER_GROUP: 1}
    assert books.take(a_batch(removed(1, group_idx=1), removed(1, group_idx=0))) == [KvRemoved((name,))]
