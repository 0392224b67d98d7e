import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fleet.core.errors import ConfigurationRefused, RequestRejected
from fleet.core.requests import ChatMessage
from fleet.frontend.text import codec as text_codec
from fleet.frontend.text.codec import REPLACEMENT, load_codec
from tests.support.builders import token_bytes, token_ids
from tests.support.frontend.text_model import BOS, END, EOS, write_json, write_model, write_sentencepiece_model

SAMPLE = "Größe 漢字 🎉 the quick\n\tfox"


@pytest.fixture(scope="session")
def codec(model_dir):
    return load_codec(model_dir)


@pytest.fixture(scope="session")
def reference(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory):
    return write_sentencepiece_model(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir):
    return load_codec(sentencepiece_dir)


def test_prompt_gets_the_special_tokens_of_the_model(codec, reference):
    assert token_ids(codec.encode(SAMPLE)) == reference.encode(SAMPLE).ids
    assert token_ids(codec.encode(SAMPLE))[0] == BOS


@given(text=st.text(max_size=60))
def test_ids_match_the_reference_tokenizer(text, codec, reference):
    assert token_ids(codec.encode(text)) == reference.encode(text).ids


def test_fallback_tokenizer_is_used_when_fast_ids_differ(model_dir, monkeypatch, reference):
    class Fast:
        @staticmethod
        def from_file(path: str) -> "Fast":
            return Fast()

        def no_truncation(self) -> None: ...
        def no_padding(self) -> None: ...
        def enable_segment_cache(self, max_bytes: int) -> None: ...
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            return token_bytes([1, 2, 3]), b""

    monkeypatch.setattr(text_codec.fastokens, "Tokenizer", Fast)

    assert token_ids(load_codec(model_dir).encode(SAMPLE)) == reference.encode(SAMPLE).ids


@given(ids=st.lists(st.integers(0, 520), max_size=60))
def test_decoding_in_steps_equals_decoding_at_once(ids, codec, reference):
    decoder = codec.decoder()

    pieces = [decoder.add(token_id) for token_id in ids]

    assert "".join(pieces) + decoder.flush() == reference.decode(ids)


@given(text=st.text(max_size=40))
def test_no_decoding_step_splits_a_character(text, codec):
    ids = token_ids(codec.encode(text))
    decoder = codec.decoder()
    given_out = ""

    for token_id in ids:
        given_out += decoder.add(token_id)
        assert text.startswith(given_out)

    assert given_out + decoder.flush() == text


@given(text=st.text("the quick\n brown ö漢🎉", max_size=40))
def test_no_sentencepiece_step_splits_a_character(text, sentencepiece):
    decoder = sentencepiece.decoder(sentencepiece.encode("the"))
    ids = token_ids(sentencepiece.encode(text))
    given_out = ""

    for token_id in ids:
        given_out += decoder.add(token_id)
        assert REPLACEMENT not in given_out

    assert given_out + decoder.flush() == (" " + text if text else "")


@given(ids=st.lists(st.integers(0, 600), max_size=60))
def test_sentencepiece_decoder_takes_any_tokens(ids, sentencepiece, sentencepiece_dir):
    vocabulary = Tokenizer.from_file(str(sentencepiece_dir / "tokenizer.json")).get_vocab()
    longest = max(len(piece.encode()) for piece in vocabulary)
    decoder = sentencepiece.decoder()

    text = "".join(decoder.add(token) for token in ids) + decoder.flush()

    assert len(text.encode()) <= longest * len(ids)


def test_incomplete_character_is_held_back_for_limited_tokens(sentencepiece, sentencepiece_dir):
    half = Tokenizer.from_file(str(sentencepiece_dir / "tokenizer.json")).token_to_id("<0xE6>")
    decoder = sentencepiece.decoder()

    pieces = [decoder.add(half) for _ in range(40)]

    assert any(pieces[:20])


def test_character_split_between_prompt_and_answer_is_decoded(codec, reference):
    ids = reference.encode("é", add_special_tokens=False).ids
    halves = [reference.token_to_id("Ã"), reference.token_to_id("©")]
    assert None not in halves
    assert reference.decode(halves) == "é" == reference.decode(ids)

    for before in ("", "the quick", "ö", " "):
        prompt = [*reference.encode(before, add_special_tokens=False).ids, halves[0]]
        assert codec.decoder(token_bytes(prompt)).add(halves[1]) == "é"


def test_bytes_that_are_no_text_do_not_end_the_answer(sentencepiece, sentencepiece_dir):
    """Decode bytes that complete a character, and then a byte that fits to no character: the library raises an error there."""
    reference = Tokenizer.from_file(str(sentencepiece_dir / "tokenizer.json"))
    complete = [reference.token_to_id(f"<0x{byte:02X}>") for byte in "ö".encode()]
    prompt = sentencepiece.encode("the")
    decoder = sentencepiece.decoder(prompt)
    stray = [*complete, complete[1], *token_ids(sentencepiece.encode("fox"))[1:]]

    text = "".join(map(decoder.add, stray)) + decoder.flush()

    assert text.startswith("ö")
    assert REPLACEMENT in text
    assert text.endswith("fox")


def test_special_tokens_give_no_text(codec):
    decoder = codec.decoder(codec.encode("the"))

    pieces = [decoder.add(token) for token in [*token_ids(codec.encode("quick"))[1:], EOS, END, *[BOS] * 40]]

    assert "".join(pieces) + decoder.flush() == "quick"


def test_conversation_is_rendered_by_the_template(codec, reference):
    tokens = codec.render([ChatMessage(role="user", content="Größe?")])

    assert reference.decode(token_ids(tokens), skip_special_tokens=False) == "<s>user: Größe?<|end|>assistant: "


def test_rejection_by_the_template_names_the_messages(codec):
    with pytest.raises(RequestRejected, match="no such role") as refused:
        codec.render([ChatMessage(role="wizard", content="x")])

    assert refused.value.field == "chat.messages"


def test_eos_ids_come_from_all_files_that_name_them(codec):
    assert codec.eos_token_ids == (EOS, END)


def test_text_of_one_token_keeps_its_space(codec, model_dir, sentencepiece, sentencepiece_dir):
    for one, folder, mark in ((codec, model_dir, "Ġ"), (sentencepiece, sentencepiece_dir, "▁")):
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        spaced = {
            piece: token_id
            for piece, token_id in vocabulary.items()
            if piece[0] == mark and piece[1:].isascii() and piece[1:].isalpha()
        }
        assert len(spaced) >= 2
        for piece, token_id in spaced.items():
            assert one.token_text(token_id) == " " + piece[1:]
            assert one.token_text(token_id) == " " + piece[1:]  # this time from the cache
    assert codec.token_text(EOS) == "</s>"


def test_template_file_wins_over_tokenizer_config(tmp_path):
    folder = write_model(tmp_path)
    template = (
        "{% generation %}{{ messages[0]['content'] | tojson }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ eos_token }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    tokens = load_codec(folder).render([ChatMessage(role="user", content='<"é">')] * 2)

    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens), skip_special_tokens=False)
    assert text == '"<\\"é\\">"</s>4'


TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
CALLS = json.dumps([{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": [1]}'}}])
WITH_TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x[0] }}){% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
)


def test_tools_and_tool_calls_are_rendered(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    conversation = [
        ChatMessage(role="user", content="x"),
        ChatMessage(role="assistant", content="", tool_calls=CALLS),
        ChatMessage(role="tool", content="2", tool_call_id="c1"),
    ]

    tokens = load_codec(folder).render(conversation, TOOLS)

    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens))
    assert text == "[add]user:x;assistant:add(1);tool:2#c1;"


def test_tool_use_template_renders_tools(tmp_path):
    folder = write_model(tmp_path)
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": WITH_TOOLS}]
    write_json(folder / "tokenizer_config.json", {"chat_template": [*templates, {"name": "rag", "template": "{% x"}]})
    codec, reference = load_codec(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    conversation = [ChatMessage(role="user", content="x")]

    assert reference.decode(token_ids(codec.render(conversation))) == "plain"
    assert reference.decode(token_ids(codec.render(conversation, TOOLS))) == "[add]user:x;"


def test_template_without_tools_rejects_tools_and_calls(codec):
    conversation = [ChatMessage(role="user", content="x")]
    with pytest.raises(RequestRejected, match="does not support tools") as refused:
        codec.render(conversation, TOOLS)
    assert refused.value.field == "chat.tools"

    with pytest.raises(RequestRejected, match="does not support tool calls") as refused:
        codec.render([*conversation, ChatMessage(role="assistant", content="", tool_calls=CALLS)])
    assert refused.value.field == "chat.messages[1].tool_calls"


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}"
    "{% if part.type == 'image' %}[image]{% else %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}{% endfor %}"
)


def test_images_are_rendered_where_they_stand(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(PARTS, encoding="utf-8")
    conversation = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="ab", parts=("a", None, "b", None)),
    ]

    tokens = load_codec(folder).render(conversation)

    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens))
    assert text == "system:Be brief.;user:a[image]b[image];"


@pytest.mark.parametrize(("template", "text"), [(BOTH, "x"), (PARTS, "user:x;")])
def test_template_gets_text_in_the_form_that_it_reads(template, text, tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    tokens = load_codec(folder).render([ChatMessage(role="user", content="x")])

    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens)) == text


def test_template_without_images_rejects_them(codec):
    with pytest.raises(RequestRejected, match="does not support images") as refused:
        codec.render([ChatMessage(role="user", content="", parts=(None,))])

    assert refused.value.field == "chat.messages[0].content"


@pytest.mark.parametrize(
    ("fields", "ids"),
    [({}, ()), ({"image_token_id": 7, "boi_token_index": 8}, (7, 8)), ({"image_token_index": -200}, ())],
)
def test_tokens_for_images_are_those_of_the_configuration(fields, ids, tmp_path):
    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, **fields})

    assert load_codec(folder).image_token_ids == ids


def test_sampling_defaults_are_those_of_the_model(tmp_path, caplog):
    folder = write_model(tmp_path)
    declared = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 1.5,
        "min_p": None,
        "max_new_tokens": 9,
        "repetition_penalty": True,
    }
    write_json(folder / "generation_config.json", declared)

    assert load_codec(folder, model_defaults=True).sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert [record.field for record in caplog.records] == ["repetition_penalty", "top_p"]
    assert load_codec(folder).sampling_defaults == {}


def test_sampling_defaults_in_use_are_logged(tmp_path, caplog):
    folder = write_model(tmp_path)
    caplog.set_level(logging.INFO, "fleet.frontend.text.codec")
    load_codec(folder, model_defaults=True)
    write_json(folder / "generation_config.json", {"temperature": 0.6, "top_k": 20})
    load_codec(folder)
    load_codec(folder, model_defaults=True)

    logged = [record.defaults for record in caplog.records if record.message == "sampling defaults read"]
    assert logged == [{"temperature": 0.6, "top_k": 20}]


@pytest.mark.parametrize(
    ("id2label", "names"),
    [(None, {}), ({"0": "calm", "1": "angry"}, {0: "calm", 1: "angry"}), (["calm"], {}), ({"x": 1}, {})],
)
def test_names_of_classes_are_those_of_the_configuration(id2label, names, tmp_path):
    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "id2label": id2label})

    assert load_codec(folder).class_names == names


def test_template_cannot_leave_its_sandbox(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8")

    with pytest.raises(RequestRejected, match="unsafe"):
        load_codec(folder).render([ChatMessage(role="user", content="x")])


def test_model_without_template_rejects_conversations(tmp_path):
    folder = write_model(tmp_path)
    write_json(folder / "tokenizer_config.json", {})

    with pytest.raises(RequestRejected, match="no chat template") as refused:
        load_codec(folder).render([ChatMessage(role="user", content="x")])

    assert refused.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: is not a tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: must hold a JSON object"),
        (lambda folder: (folder / "special_tokens_map.json").mkdir(), "special_tokens_map.json: cannot be read"),
        (lambda folder: (folder / "generation_config.json").write_text("[" * 99_999), "generation_config.json: is not"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "chat_template.jinja: the chat template"),
    ],
)
def test_invalid_model_folder_is_refused_with_the_cause(tmp_path, break_it, named):
    folder = write_model(tmp_path)
    break_it(folder)

    with pytest.raises(ConfigurationRefused, match=named):
        load_codec(folder)


def test_missing_model_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationRefused, match="is not a folder"):
        load_codec(tmp_path / "nowhere")


def test_vocabulary_includes_padded_embedding_rows(tmp_path):
    folder = write_model(tmp_path)
    config = json.loads(Path(folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vocab_size": 1024})

    assert load_codec(folder).vocab_size == 1024


VARIABLES = "{% for m in messages %}{{ m.role }} {% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"


@pytest.mark.parametrize(
    ("template_args", "text"),
    [("", "user"), ('{"enable_thinking": false}', "user False"), ('{"reasoning_effort": "none"}', "user")],
)
def test_template_gets_the_variables_of_the_request(template_args, text, tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(VARIABLES, encoding="utf-8")

    tokens = load_codec(folder).render([ChatMessage(role="user", content="x")], "", template_args)

    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens)).strip() == text


GPT_OSS = (
    "{% macro system() %}"
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort + ' ' }}"
    "{% endmacro %}{{ system() }}"
    "{% for tool in tools or [] %}{{ tool.function.name + ':' + tool.function.description + ' ' }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% endfor %}"
)
"""Chat template that reads its variables in the same way as the chat template of gpt-oss."""


@pytest.mark.parametrize(
    ("template_args", "text"),
    [("", "medium user"), ('{"reasoning_effort": "low", "enable_thinking": true}', "low user")],
)
def test_effort_needs_no_switch_in_a_template_that_has_it(template_args, text, tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(GPT_OSS, encoding="utf-8")

    tokens = load_codec(folder).render([ChatMessage(role="user", content="x")], "", template_args)

    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens)).strip() == text


def test_template_that_needs_descriptions_gets_empty_ones(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(GPT_OSS, encoding="utf-8")
    functions = ({"name": "a"}, {"name": "b", "description": "B"}, {"name": "c", "description": None})
    tools = [{"type": "function", "function": each} for each in functions]

    tokens = load_codec(folder).render([ChatMessage(role="user", content="x")], json.dumps(tools))

    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens)).strip()
    assert text == "medium a: b:B c: user"


def test_half_a_surrogate_pair_in_a_call_is_refused(tmp_path):
    folder = write_model(tmp_path)
    template = "{% for m in messages %}{{ (m.tool_calls or [{'function': {'arguments': {'x': ''}}}])[0].function.arguments.x }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    calls = json.dumps([{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}])

    with pytest.raises(RequestRejected, match="surrogates not allowed") as refused:
        load_codec(folder).render([ChatMessage(role="assistant", content="", tool_calls=calls)])

    assert refused.value.field == "chat.messages"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "raise_exception", "eos_token", "effort"]
)
def test_variables_of_the_router_and_unknown_ones_are_refused(name, tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(VARIABLES + "{{ eos_token }}", encoding="utf-8")

    with pytest.raises(RequestRejected, match=name) as refused:
        load_codec(folder).render([ChatMessage(role="user", content="x")], "", json.dumps({name: 1}))

    assert refused.value.field == "chat.template_args"


@pytest.mark.parametrize(("more", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_developer_is_system_where_the_template_does_not_know_it(more, role, tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(VARIABLES + more, encoding="utf-8")

    tokens = load_codec(folder).render([ChatMessage(role="developer", content="x")])

    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(token_ids(tokens)).strip() == role
