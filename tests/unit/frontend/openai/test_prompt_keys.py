"""Prompt keys: the blocks that prompts for external backends share."""

import json

import pytest
from msgspec import Raw

from fleet.core.ids import ModelName
from fleet.core.system_clock import SystemClock
from fleet.frontend.openai.prompt_keys import PromptReader, SecretBlockKeys
from fleet.frontend.text.codec import load_codec
from fleet.router.kv_index.prefix_index import keys_of
from kvstore.block import HashAlgorithm, chain

NOTHING = Raw()


def a_reader(model_dir=None, *, named_by_workers: bool = False, block_tokens: int = 16) -> PromptReader:
    codec = load_codec(model_dir) if model_dir else None
    private = None if named_by_workers else SecretBlockKeys()
    return PromptReader(ModelName("m"), [block_tokens], codec, SystemClock(), private)


def raw(value: object) -> Raw:
    return Raw(json.dumps(value).encode())


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = [mine == its for mine, its in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_prompts_with_equal_beginning_share_its_blocks(model_dir, with_tokenizer):
    reader = a_reader(model_dir if with_tokenizer else None)
    one = reader.read(raw("the quick brown fox " * 40 + "jumps"), NOTHING, NOTHING)
    other = reader.read(raw("the quick brown fox " * 40 + "sleeps"), NOTHING, NOTHING)
    third = reader.read(raw("a lazy dog " + "the quick brown fox " * 40), NOTHING, NOTHING)

    assert common(one.keys[16], other.keys[16]) >= len(one.keys[16]) - 1 > 5
    assert common(one.keys[16], third.keys[16]) == 0


def test_continued_conversation_shares_its_earlier_blocks():
    reader = a_reader()
    messages = [{"role": "user", "content": "x" * 500}]
    before = reader.read(NOTHING, raw(messages), NOTHING)
    after = reader.read(NOTHING, raw([*messages, {"role": "assistant", "content": "y" * 500}]), NOTHING)

    assert common(before.keys[16], after.keys[16]) >= len(before.keys[16]) - 1 > 5


def test_keys_are_computed_from_token_ids(model_dir):
    codec = load_codec(model_dir)
    text = "the quick brown fox " * 20
    read = a_reader(model_dir, named_by_workers=True).read(raw(text), NOTHING, NOTHING)

    assert read.tokens == codec.encode(text)
    assert read.keys[16] == keys_of(chain(read.tokens, 16, algorithm=HashAlgorithm.XXH3_128))


def test_prompt_of_token_ids_is_not_tokenized(model_dir):
    read = a_reader(model_dir).read(raw([1, 2, 3]), NOTHING, NOTHING)

    assert read.tokens == b"".join(token.to_bytes(4, "little") for token in (1, 2, 3))


def test_key_covers_everything_before_its_block(model_dir):
    reader = a_reader(model_dir)
    one = reader.read(raw([*range(16), *range(16)]), NOTHING, NOTHING).keys[16]
    other = reader.read(raw([*range(1, 17), *range(16)]), NOTHING, NOTHING).keys[16]

    assert len({*one, *other}) == 4


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_prompts_share_no_block_after_different_images(model_dir, with_tokenizer):
    reader = a_reader(model_dir if with_tokenizer else None)

    def keys(image: str) -> tuple[int, ...]:
        text = {"type": "text", "text": "the quick brown fox " * 40}
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return reader.read(NOTHING, raw([{"role": "user", "content": [text, shown, text]}]), NOTHING).keys[16]

    one, other = keys("AAAA" * 100), keys("BBBB" * 100)

    before = common(one, other)
    assert 5 < before < len(one) // 2
    assert not set(one[before:]) & set(other[before:])
    assert keys("AAAA" * 100) == one


def test_same_messages_with_tools_share_no_block(model_dir):
    reader = a_reader(model_dir)
    messages = raw([{"role": "user", "content": "the quick brown fox " * 40}])
    tools = raw([{"type": "function", "function": {"name": "f"}}])

    assert common(reader.read(NOTHING, messages, tools).keys[16], reader.read(NOTHING, messages, NOTHING).keys[16]) == 0


def test_only_equal_secrets_give_equal_keys():
    one, same, other, alone, also_alone = (SecretBlockKeys(secret) for secret in ("a", "a", "b", "", ""))
    tokens = bytes(range(256)) * 4
    named = [keys(tokens, 16, salt) for keys in (one, other, alone, also_alone) for salt in (b"", b"salt" * 8)]

    assert (same.fingerprint, same(tokens, 16, b"")) == (one.fingerprint, named[0])
    assert same(tokens, 16, b"salt" * 8) == named[1]
    assert len({key for keys in named for key in keys}) == sum(map(len, named)) == 8 * 16
    assert len({one.fingerprint, other.fingerprint, 0}) == 3
    assert alone.fingerprint == also_alone.fingerprint == 0  # 0: the keys are private to the process


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        (b'"\\ud800"', b""),
        (b'"\xff"', b""),
        (b"[-1]", b""),
        (b"[99999999999]", b""),
        (b'["a", "b"]', b""),
        (b"null", b""),
        (b"", b""),
        (b"", b"[]"),
        (b"", b'[{"role": "wizard", "content": "x"}]'),
        (b"", b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'),
        (b"", b'[{"role": "user"}]'),
        (b"", b'{"role": "user"}'),
    ],
)
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_unreadable_prompt_is_not_rejected(model_dir, prompt, messages, with_tokenizer):
    read = a_reader(model_dir if with_tokenizer else None).read(Raw(prompt), Raw(messages), NOTHING)

    assert len(read.tokens) <= max(len(prompt), len(messages), 64)


def test_uncached_prompt_has_no_keys():
    read = a_reader().uncached(raw("x" * 4000))

    assert read.keys == {16: ()}
    assert len(read.tokens) > 4000


@pytest.mark.parametrize(
    ("instructions", "turns"),
    [
        ("be brief", [{"role": "user", "content": "hi"}]),
        ([{"type": "text", "text": "be brief"}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        ("be brief", [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]),
        ("be brief", "hi"),
        (None, [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]),
    ],
)
def test_conversation_is_rendered_like_a_chat(model_dir, instructions, turns):
    reader = a_reader(model_dir)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]

    read = reader.read(NOTHING, raw(chat), NOTHING)
    assert reader.read_messages(raw(instructions), raw(turns), NOTHING) == read
    beginning = load_codec(model_dir).encode("")
    assert len(beginning) == 4
    assert reader.read_response(raw(instructions), raw(turns), NOTHING).tokens == beginning + read.tokens


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"type": "function_call_output", "call_id": "c", "output": "x", "role": "", "content": ""}],
        [{"type": "reasoning"}],
        7,
        None,
    ],
)
def test_conversation_with_more_than_text_is_read_as_bytes(model_dir, turns):
    read = a_reader(model_dir).read_response(raw("s"), raw(turns), NOTHING)

    assert read.tokens == b'"s"' + json.dumps(turns).encode()
