"""Parsed answers: the result does not depend on the steps in which the tokens come, and malformed output counts as text."""

import json
import re
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.requests import AnswerParsers, CallDelta, Delta, join_calls
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.parsed_answer import MAX_DELIMITER_CHARACTERS, EngineParsedAnswer, TemplateParsedAnswer
from fleet.frontend.text.response_templates import CompiledTemplate, ResponseTemplates
from tests.support.counted_calls import count_calls

ID = RequestId("r")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
TEMPLATES = ResponseTemplates()
TEMPLATES.load()
JSON_CALLS = AnswerParsers(tool_calls="hermes", reasoning="qwen3")
XML_CALLS = AnswerParsers(tool_calls="qwen3_coder", reasoning="qwen3")

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": "3", "y": "<b> é"}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=x>\n3\n</parameter>\n<parameter=y>\n<b> é\n</parameter>\n</function>\n</tool_call>"
PARSED_CALL = ("add", '{"x": 3, "y": "<b> é"}')

BAD_CALLS = [
    '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"x": 1e999}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
]
"""Tool calls whose arguments are not a JSON object."""

CORPUS = [
    (JSON_CALLS, "", "no call at all", ("", "no call at all", [])),
    (JSON_CALLS, "", CALL, ("", "", [PARSED_CALL])),
    (JSON_CALLS, "", f"Wait. {CALL}\n{CALL}\n", ("", "Wait. ", [PARSED_CALL, PARSED_CALL])),
    (JSON_CALLS, "", f"<think>a < b</think>\n\nSo {CALL}", ("a < b", "So ", [PARSED_CALL])),
    (JSON_CALLS, "<think>", f"why?</think>{CALL} done", ("why?", "done", [PARSED_CALL])),
    (JSON_CALLS, "<think></think>", "1 < 2 > 0 <tool_cal>", ("", "1 < 2 > 0 <tool_cal>", [])),
    (JSON_CALLS, "<think>", "cut by max_tok", ("cut by max_tok", "", [])),
    (XML_CALLS, "", f"ok{XML}{XML}", ("", "ok", [PARSED_CALL, PARSED_CALL])),
    (
        XML_CALLS,
        "",
        XML.replace("\n</parameter>\n</function>", "\n</function>"),
        ("", "", [PARSED_CALL]),
    ),  # a value without its end tag
    (XML_CALLS, "", XML.replace("<b>", "<parameter=z>"), ("", "", [("add", '{"x": 3, "y": "<parameter=z> é"}')])),
    # A malformed region counts as text, from its start delimiter on.
    (JSON_CALLS, "", f"a{BAD_CALLS[0]}b", ("", f"a{BAD_CALLS[0]}b", [])),
    (JSON_CALLS, "", f"a{BAD_CALLS[1]}b", ("", f"a{BAD_CALLS[1]}b", [])),
    (JSON_CALLS, "", f"a{BAD_CALLS[2]}b", ("", f"a{BAD_CALLS[2]}b", [])),
    (JSON_CALLS, "", 'a<tool_call>{"name": "ad', ("", 'a<tool_call>{"name": "ad', [])),
    (JSON_CALLS, "", f"{CALL}<tool_call>[}}</tool_call>b", ("", "<tool_call>[}</tool_call>b", [PARSED_CALL])),
    (JSON_CALLS, "", "<tool_call>3</tool_call>", ("", "<tool_call>3</tool_call>", [])),
    (JSON_CALLS, "", '<tool_call>{"name": 5}</tool_call>', ("", '<tool_call>{"name": 5}</tool_call>', [])),
    (JSON_CALLS, "", "\ufffd<tool_call>\ufffd</tool_call>", ("", "\ufffd<tool_call>\ufffd</tool_call>", [])),
]


class Characters:
    """Decoder whose tokens are characters."""

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def an_answer(
    parsers: AnswerParsers | None, prefill: str, own: dict[str, Any] | None = None, **options: object
) -> TemplateParsedAnswer:
    text = AnswerText(Characters(), end_token_ids=frozenset({0}))
    template = TEMPLATES.compiled(f"{parsers} {own}", own, parsers)
    prompt = f"<|user|>{CALL}<|end|><|assistant|>{prefill}"
    return TemplateParsedAnswer(ID, text, template, prompt=prompt, tools=TOOLS, **options)


def parse(answer: TemplateParsedAnswer, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    deltas = [answer.take(Progress(request_id=ID, token_ids=tuple(map(ord, piece)))) for piece in pieces]
    deltas.append(answer.finish())
    calls = join_calls(call for delta in deltas for call in delta.calls)
    assert [call.id for call in calls] == [f"call_r_{index}" for index in range(len(calls))]
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.text for delta in deltas),
        [(call.name, call.arguments) for call in calls],
    )


def cut(text: str, positions: list[int]) -> list[str]:
    bounds = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]


@pytest.mark.parametrize(("parsers", "prefill", "text", "expected"), CORPUS)
def test_answer_is_taken_apart_at_each_split(parsers, prefill, text, expected):
    for position in range(len(text) + 1):
        assert parse(an_answer(parsers, prefill), [text[:position], text[position:]]) == expected
    assert parse(an_answer(parsers, prefill), list(text)) == expected


@given(st.sampled_from(CORPUS), st.lists(st.integers(0, 200)))
def test_answer_is_taken_apart_at_several_splits(case, positions):
    parsers, prefill, text, expected = case

    assert parse(an_answer(parsers, prefill), cut(text, positions)) == expected


FRAGMENTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>",
             "</parameter>", '{"name": "f", "arguments": ', "{}", "}", "<", ">", " ", "\n", "é", "\x01", "\ufffd", '"\\ud83d"', "null"]  # fmt: skip


@given(
    st.sampled_from([JSON_CALLS, XML_CALLS]),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12)
    .map("".join)
    .filter(lambda text: "\0" not in text),
    st.lists(st.integers(0, 200)),
)
@example(JSON_CALLS, "<tool_call>" * 2, [11])
def test_any_output_is_parsed_alike_whole_and_in_pieces(parsers, text, positions):
    whole = parse(an_answer(parsers, ""), [text])

    assert parse(an_answer(parsers, ""), cut(text, positions)) == whole
    for _, arguments in whole[2]:
        json.loads(arguments)
    json.dumps(whole, ensure_ascii=False).encode()


def test_half_a_surrogate_pair_in_arguments_is_replaced():
    output = '<tool_call>\n{"name": "add", "arguments": {"x": "\\ud83d", "y": "\\ud83d\\ude00"}}\n</tool_call>'

    [(name, arguments)] = parse(an_answer(JSON_CALLS, ""), list(output))[2]

    assert (name, json.loads(arguments)) == ("add", {"x": "\ufffd", "y": "\U0001f600"})


def own_template(**fields: dict[str, Any]) -> dict[str, Any]:
    """Return a response template in the form in which a model folder contains it."""
    return {"version": 1, "start_anchor": "<|assistant|>", "fields": fields}


def a_field(open_pattern: str, close_pattern: str, **more: object) -> dict[str, Any]:
    return {"open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True, **more}


VERBATIM = {"content": "text", "content_args": {"strip": False}}
AS_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
ADD = '{"name": "add", "arguments": {"x": 3, "y": "<b> é"}}'
ANY_CALL = {
    "content": "text",
    "content_args": {"strip": False},
    "transform": {"type": "function", "function": {"name": "f", "arguments": {"text": "{content}"}}},
}
ESCAPED = own_template(
    content=VERBATIM,
    thinking=a_field(r"\[THINK\]", r"\[/THINK\]", join="", **VERBATIM),
    tool_calls=a_field(r"\[TOOL_CALLS\]\s*", r"\[/TOOL_CALLS\]", **AS_CALL),
)
ALTERNATIVES = own_template(content=VERBATIM, tool_calls=a_field(r"@call:|call=", r"(?<=\})(?:;|\n|\Z)", **AS_CALL))
FLAGGED = own_template(content=VERBATIM, tool_calls=a_field(r"(?i)call:", r";(?i)end", **AS_CALL))
LITERAL_START = own_template(content=VERBATIM, tool_calls=a_field(r"@\w+:\s*", r";\d", **AS_CALL))
PIPES = own_template(content=VERBATIM, tool_calls=a_field(r"<\|call\|>", r"<\|end\|>", **AS_CALL))
AFTER_A_LINE = own_template(content=VERBATIM, tool_calls=a_field(r"(?<=\n)CALL ", ";", **AS_CALL))
MIXED = own_template(
    content=VERBATIM,
    thinking={"open": "<think>", "close": "</think>", "repeats": True, "join": "", **VERBATIM},
    tool_calls=a_field(r"[@#]call\s", r";+", **AS_CALL),
)
CHANNELS = own_template(
    thinking={"open": "<|analysis|>", "close": "<|end|>", "repeats": True, "join": "", **VERBATIM},
    content={"open": "<|final|>", "close": "<|end|>", "repeats": True, "join": "", **VERBATIM},
    tool_calls=a_field(r"<\|call\|>\s*(?=\{)", r"<\|end\|>", **AS_CALL),
)
ONLY_REASONING = own_template(thinking=VERBATIM)
ONLY_A_CALL = own_template(tool_calls={**AS_CALL, "repeats": True})

OWN_CORPUS = [
    (ESCAPED, f"So [TOOL_CALLS]{ADD}[/TOOL_CALLS] done", ("", "So done", [PARSED_CALL])),
    (ESCAPED, f"[THINK]a [b] \\c[/THINK]So [TOOL_CALLS] {ADD}[/TOOL_CALLS]", ("a [b] \\c", "So ", [PARSED_CALL])),
    (ESCAPED, f"a[TOOL_CALLS]{ADD}[/TOOL_CALLS][TOOL_CALLS]{ADD}[/TOOL_CALLS]", ("", "a", [PARSED_CALL, PARSED_CALL])),
    (AFTER_A_LINE, "x\nCALL {bad;y", ("", "x\nCALL {bad;y", [])),
    (AFTER_A_LINE, f"x CALL {ADD};\nCALL {ADD};y", ("", f"x CALL {ADD};\ny", [PARSED_CALL])),
    (ESCAPED, "a[0] \\[TOOL_CALL]", ("", "a[0] \\[TOOL_CALL]", [])),
    (ESCAPED, "a[TOOL_CALLS]{bad[/TOOL_CALLS]b", ("", "a[TOOL_CALLS]{bad[/TOOL_CALLS]b", [])),
    (ALTERNATIVES, f"So @call:{ADD};and call={ADD}", ("", "So and ", [PARSED_CALL, PARSED_CALL])),
    (FLAGGED, f"So CALL:{ADD};END done", ("", "So done", [PARSED_CALL])),
    (LITERAL_START, f"a@b @add: {ADD};1;@add:{ADD};2", ("", "a@b ;", [PARSED_CALL, PARSED_CALL])),
    (LITERAL_START, "a@add: {bad;1b", ("", "a@add: {bad;1b", [])),
    (PIPES, f"a<|b|>|call|<|call|>{ADD}<|end|>", ("", "a<|b|>|call|", [PARSED_CALL])),
    (MIXED, f"<think>x<y</think>So #call {ADD};;@call {ADD};", ("x<y", "So ", [PARSED_CALL, PARSED_CALL])),
    (CHANNELS, f"no <|b <|analysis|>a<b<|end|>no<|call|>no<|call|>{ADD}<|end|>no<|final|>So<|end|>no", ("a<b", "So", [PARSED_CALL])),
    (CHANNELS, "no<|call|>{bad<|end|>b", ("", "<|call|>{bad<|end|>b", [])),
    (ONLY_REASONING, "why [not] <x>", ("why [not] <x>", "", [])),
    (ONLY_A_CALL, ADD, ("", "", [PARSED_CALL])),
    (ONLY_A_CALL, "{bad", ("", "{bad", [])),
]  # fmt: skip


@pytest.mark.parametrize(("own", "text", "expected"), OWN_CORPUS)
def test_own_template_gives_the_same_at_each_split(own, text, expected):
    for position in range(len(text) + 1):
        assert parse(an_answer(None, "", own), [text[:position], text[position:]]) == expected
    assert parse(an_answer(None, "", own), list(text)) == expected


OWN_FRAGMENTS = ["<|analysis|>", "<|final|>", "[TOOL_CALLS]", "[/TOOL_CALLS]", "[THINK]", "[/THINK]", "@call:", "call=", "#call ", "@x:", "Call:", ";end", "<think>", "<|call|>", "<|end|>",
                 "</think>", ";1", ";", "[", "\\", "@", "\n", " ", "}", "é", ADD]  # fmt: skip


@given(
    st.sampled_from([case[0] for case in OWN_CORPUS]),
    st.lists(st.sampled_from(OWN_FRAGMENTS) | st.text(max_size=3), max_size=12)
    .map("".join)
    .filter(lambda text: "\0" not in text),
    st.lists(st.integers(0, 200)),
)
def test_own_template_parses_alike_whole_and_in_pieces(own, text, positions):
    assert parse(an_answer(None, "", own), cut(text, positions)) == parse(an_answer(None, "", own), [text])


PATTERN_PARTS = [r"\[", "a", "b", "<", "a|b", "(?:ab|a)", "(ab|b<)", "[ab]", "[^ab]", r"\w", ".", "a?", "b*", "a+", "(?:<a){2}", "(?i:a)", "(?=b)",
                 "(?!a)", "(?<=a)", "(?<!b)", r"\b", "^", "$", r"\Z", "(?>ab)", "a{1,2}", "é", r"(?=\bab)", "(?=(?<=b)a)", "(?!(?<=<)a)", "(a)?(?(1)b|(?<=b)<)"]  # fmt: skip
PATTERNS = st.lists(st.sampled_from(PATTERN_PARTS), min_size=1, max_size=4).map("".join)
# Each pattern is made to match at least one character: with empty delimiters, the parser would never end.
OPENS = PATTERNS.map(lambda pattern: f"(?:{pattern})[ab]")


@given(
    OPENS,
    PATTERNS,
    st.sampled_from(["", "(?i)"]),
    st.booleans(),
    st.booleans(),
    st.text("ab<[Aé \n", max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
)
@example(r"\b[ab]", "<", "", True, True, "[ [Aa<", [1])
@example("(?<!A)[ab]", "<", "", True, True, "[ [Aa<", [1])
@example("a+<[ab]", r"\[", "", True, True, "é[aa<a", [1])
@example(r"(?=\b[ab])[ab]", "<", "", True, True, "é a<é", [1])
@example(r"(?!(?<!\n)[ab])[ab]", "<", "", True, True, "é\na<é", [1])
@example("é(A)?(?(1)b|(?<= é)<)[ab]", "<", "", True, True, "A é<aA<A", [1])
@example("é(A)?(?(1)(?<= éA)<)[ab]", "<", "", True, True, "A éA<aA<A", [1])
def test_search_for_delimiters_changes_no_answer(begins, ends, flags, is_reasoning, has_content, text, positions):
    """Compare with the parser alone, without the search for delimiters; it gets every character."""
    region = {"open_pattern": flags + begins, "close_pattern": ends, "repeats": True}
    own = own_template(
        **{"content": VERBATIM} if has_content else {},
        **{"thinking": {**region, "join": "", **VERBATIM}} if is_reasoning else {"tool_calls": {**region, **ANY_CALL}},
    )
    template = TEMPLATES.compiled(f"{own}", own, None)
    slow = CompiledTemplate(template.template, dict.fromkeys(template.searches))

    def parsed(compiled: CompiledTemplate, pieces: list[str]) -> object:
        answer_text = AnswerText(Characters(), end_token_ids=frozenset({0}))
        return parse(TemplateParsedAnswer(ID, answer_text, compiled, prompt="<|assistant|>", tools=TOOLS), pieces)

    assert parsed(template, cut(text, positions)) == parsed(slow, list(text))


@pytest.mark.parametrize(
    "pattern",
    [
        r"\[X\]",
        "<tool",
        r"<\|x\|>",
        r"a(?P<n>[^>]+)>",
        r"\\x",
        r"a\d+",
        "a(?:b)?",
        "a|b",
        "(?i)X",
        r"(?:x|\Z)",
        r"\{\"",
        "a{",
        r"\[[XY]\]",
    ],
)
def test_pattern_of_known_beginning_leaves_other_text_alone(pattern):
    answer = an_answer(
        None, "", own_template(content=VERBATIM, thinking={"open_pattern": pattern, "transform": ["{n}"]})
    )
    answer.take(Progress(request_id=ID, token_ids=(ord("u"),)))

    with count_calls("") as counted:
        answer.take(Progress(request_id=ID, token_ids=tuple(map(ord, "word"))))

    assert not any("chat_parsing" in file for file in counted.files)


@pytest.mark.parametrize("pattern", ["a?w", "a*w", "a{0}w", r"\w", "(?=w)w", r"\bw", "(?<!o)w", "(?:vo){e<=2}(?<=w)"])
def test_pattern_of_unknown_beginning_is_searched_in_all_text(pattern):
    answer = an_answer(None, "", own_template(content=VERBATIM, thinking={"open_pattern": pattern, **VERBATIM}))
    answer.take(Progress(request_id=ID, token_ids=(ord("-"),)))

    assert parse(answer, ["wo", "rd"]) == ("ord", "", [])


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        *((begins, "(?=b)") for begins in ["a?", "(?=a)", "(a*|b)", "(?:a|){2}", r"\b", "(?>a?)"]),
        *(("(?=a)", ends) for ends in [r"\Z|a?", "^"]),
        (r"\p{N}*", r"\p{N}*"),
        ("(?:a){d}", "(?:a){d}"),
        *((each, each) for each in [r"\m", r"(?=\p{L})", "(?V1)(?=x)", "(?r)(?=x)", "(?=x)(?i)"]),
        (r"(?=\p{L})", "a?"),
        (r"(?=\n\n)", "$"),
        *(("$", ends) for ends in ["$", "a?", r"(?=\n)"]),
        *(("(?:;|$)", ends) for ends in ["(?:;|$)", "a?"]),
        (r"(?<=;)(?=\n)", "$"),
    ],
)
def test_template_whose_region_can_be_empty_anywhere_is_refused(begins, ends):
    own = own_template(content=VERBATIM, thinking={"open_pattern": begins, "close_pattern": ends, **VERBATIM})

    with pytest.raises(RequestRejected, match="'thinking' can open and close at the same place"):
        an_answer(None, "", own)


class CountedPattern:
    """Regular expression that fails the test if it is searched too often from the same position of a text."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self._searches: Counter[tuple[int, int]] = Counter()

    def search(self, text: str, position: int, **options: bool) -> Any:
        self._searches[len(text), position] += 1
        assert self._searches[len(text), position] < 10, "the parser searches at one place again and again"
        return self._pattern.search(text, position, **options)


@given(PATTERNS, PATTERNS, st.text("ab<[Aé \n", max_size=12))
@example("$", "$", "a\nb")
@example("(?:;|$)", "a?", "a\nb")
@example(r"(?<=a)(?=\n)", "$", "a\nb")
@example(r"(?=\n)", r"(?<=\p{L})$", "a\nb")
def test_parser_ends_for_each_template_that_is_accepted(begins, ends, text):
    own = own_template(content=VERBATIM, thinking=a_field(begins, ends, join="", **VERBATIM))
    try:
        compiled = TEMPLATES.compiled(f"{own}", own, None)
    except RequestRejected:
        return
    thinking = replace(compiled.fields["thinking"], open_re=CountedPattern(compiled.fields["thinking"].open_re))
    limited = replace(compiled.template, fields=compiled.fields | {"thinking": thinking})
    answer_text = AnswerText(Characters(), end_token_ids=frozenset({0}))

    parse(
        TemplateParsedAnswer(ID, answer_text, CompiledTemplate(limited, compiled.searches), prompt="", tools=TOOLS),
        list(text),
    )


@pytest.mark.parametrize("place", ["open_pattern", "close_pattern", "start_anchor_pattern"])
def test_answer_is_text_where_a_search_takes_exponential_time(place):
    slow, text = "<(a|aa)+;", f"<{'a' * 60}"
    own = own_template(content=VERBATIM, thinking={"open_pattern": "<", "close_pattern": ">", **VERBATIM})
    if place == "start_anchor_pattern":
        del own["start_anchor"]
        own[place] = slow
        assert parse(an_answer(None, f"<|assistant|>{text}.", own), ["So ", "it is"]) == ("", "So it is", [])
    else:
        own["fields"]["thinking"][place] = slow
        answer = parse(an_answer(None, "", own), ["So <", text, ".", "it is"])
        assert "".join(answer[:2]).replace("<", "").endswith(f"{'a' * 60}.it is")


@pytest.mark.parametrize("ends", [r"\Z", "$", r"(?:;|\Z)", r"\n+", "[;.]"])
def test_call_that_begins_at_its_text_may_end_with_the_answer(ends):
    own = own_template(content=VERBATIM, tool_calls=a_field(r'(?=\{"name")', ends, **AS_CALL))

    assert parse(an_answer(None, "", own), ["So ", ADD[:5], ADD[5:]]) == ("", "So ", [PARSED_CALL])


def test_parameters_without_ends_take_linear_time():
    """Parse 20,000 parameters without end tags; with a quadratic parser, this takes minutes."""
    call = "<tool_call>\n<function=add>\n" + "<parameter=y>" * 20_000 + "</function>\n</tool_call>"

    assert parse(an_answer(XML_CALLS, ""), [call]) == ("", "", [("add", json.dumps({"y": "<parameter=y>" * 19_999}))])


def test_delimiter_that_never_ends_becomes_text():
    text = "<tool_call>" + " " * MAX_DELIMITER_CHARACTERS + "<function=add>"

    assert parse(an_answer(XML_CALLS, ""), ["So ", text, "b"]) == ("", f"So {text}b", [])
    assert parse(an_answer(XML_CALLS, ""), list(f"So {text}b")) == ("", f"So {text}b", [])


DROPPED = "n" * (MAX_DELIMITER_CHARACTERS + 100)


@pytest.mark.parametrize("begun", ["", "<|call|>"])
@pytest.mark.parametrize(
    "call_opens", [r"<\|call\|>\s*(?=\{)", r"(?<!x)<\|call\|>\s*(?=\{)"], ids=["searched", "all-text"]
)
def test_dropped_text_may_be_longer_than_a_delimiter(call_opens, begun):
    own = own_template(**CHANNELS["fields"] | {"tool_calls": a_field(call_opens, r"<\|end\|>", **AS_CALL)})
    text = f"{begun}{DROPPED}<|final|>So<|end|>"

    assert parse(an_answer(None, "", own), [text]) == ("", "So", [])
    assert parse(an_answer(None, "", own), list(text)) == ("", "So", [])


def test_text_after_a_dropped_delimiter_is_left_alone_again():
    answer = an_answer(None, "", CHANNELS)
    for text in ("<|call|>", "no"):
        answer.take(Progress(request_id=ID, token_ids=tuple(map(ord, text))))

    with count_calls("") as counted:
        answer.take(Progress(request_id=ID, token_ids=tuple(map(ord, "word"))))

    assert not any("chat_parsing" in file for file in counted.files)


TYPED_CHANNELS = own_template(
    thinking=a_field(r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>", join="", **VERBATIM),
    content=a_field(r"<\|channel\|>final<\|message\|>", r"<\|end\|>", join="", **VERBATIM),
    tool_calls=a_field(r"<\|channel\|>call\s*(?=\{)", r"<\|end\|>", **AS_CALL),
)


@pytest.mark.parametrize(
    ("parsers", "own", "begun", "text", "expected"),
    [
        (None, TYPED_CHANNELS, "<|channel|>", "analysis<|message|>why<|end|><|channel|>final<|message|>So<|end|>", ("why", "So", [])),
        (None, TYPED_CHANNELS, "<|channel|>", f"call {ADD}<|end|>no", ("", "", [PARSED_CALL])),
        (None, TYPED_CHANNELS, "<|channel|>", "no<|channel|>final<|message|>So<|end|>", ("", "So", [])),
        (None, TYPED_CHANNELS, "<|channel|>", "call {bad<|end|>x", ("", "call {bad<|end|>x", [])),
        (XML_CALLS, None, "<tool_call>", f"{XML.removeprefix('<tool_call>')}So{XML}", ("", "So", [PARSED_CALL, PARSED_CALL])),
        (XML_CALLS, None, "<tool_call>", "So <b>", ("", "So <b>", [])),
        (XML_CALLS, None, "<tool_call>", DROPPED.replace("n", " "), ("", DROPPED.replace("n", " "), [])),
        (JSON_CALLS, None, "<tool", f"_call>{ADD}</tool_call>So", ("", "So", [PARSED_CALL])),
        (JSON_CALLS, None, "<tool", "_call>{bad</tool_call>", ("", "_call>{bad</tool_call>", [])),
        (JSON_CALLS, None, "<think>1 <", "2</think>So", ("2", "So", [])),
    ],
)  # fmt: skip
def test_delimiter_that_the_prompt_began_is_completed(parsers, own, begun, text, expected):
    for position in range(0, len(text) + 1, max(1, len(text) // 100)):
        assert parse(an_answer(parsers, begun, own), [text[:position], text[position:]]) == expected
    assert parse(an_answer(parsers, begun, own), list(text)) == expected


def test_malformed_call_in_the_prompt_fails_no_answer():
    assert parse(an_answer(JSON_CALLS, "<tool_call>{bad</tool_call>"), ["So ", CALL]) == ("", "So ", [PARSED_CALL])


VALUES_WITH_TAGS = {"value_parser": {"name": "xml-inline", "args": {"tag_pattern": "("}}}


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"content": {"content": []}}, "unhashable"),
        ({"thinking": {"open_pattern": 5}}, "first argument must be a string"),
        ({"thinking": {"open": "x" * 257}}, "one of over 256 characters"),
        (
            {"tool_calls": {"open": "x", "content": "xml-inline", "content_args": {"tag_pattern": "("}}},
            r"the tag_pattern .* missing \)",
        ),
        (
            {"tool_calls": {"open": "x", "content": "kv-lines", "content_args": VALUES_WITH_TAGS}},
            r"the tag_pattern .* missing \)",
        ),
        ({f"a{number}": {"open": "x"} for number in range(65)}, "at most 64 are supported"),
    ],
)
def test_template_that_is_not_valid_is_refused_with_its_cause(wrong, cause):
    with pytest.raises(RequestRejected, match=cause):
        an_answer(None, "", own_template(**wrong))


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        ({}, "fields must be a non-empty dict"),
        ({"fields": 5}, "fields must be a non-empty dict"),
        ([], "response_template must be a dict, got list"),
        ("fields", "response_template must be a dict, got str"),
    ],
)
def test_template_of_another_shape_is_refused_with_its_cause(own, cause):
    with pytest.raises(RequestRejected, match=cause):
        an_answer(None, "", own)


def test_parser_that_hides_what_it_holds_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_parsing.ResponseParser", lambda *_, **__: object())

    with pytest.raises(RequestRejected, match=f"transformers {version('transformers')}, .*; install transformers 5.19"):
        an_answer(None, "", own_template(thinking={"open": "x"}))


def test_refused_template_is_compiled_once():
    templates = ResponseTemplates()
    templates.load()
    causes = []
    for _ in range(2):
        with count_calls("") as counted, pytest.raises(RequestRejected) as refused:
            templates.compiled("m", own_template(thinking={"open_pattern": 5}), None)
        causes.append(refused.value.message)

    assert causes[0] == causes[1]
    assert not any("chat_parsing" in file for file in counted.files)


def test_single_call_leaves_out_further_ones():
    answer = an_answer(JSON_CALLS, "", is_single=True)

    assert parse(answer, [CALL + CALL, CALL]) == ("", "", [PARSED_CALL])


def test_text_without_delimiters_keeps_its_tokens():
    answer = an_answer(JSON_CALLS, "")

    for word in ("one", " two"):
        ids = tuple(map(ord, word))
        assert answer.take(Progress(request_id=ID, token_ids=ids)) == Delta(text=word, token_ids=ids)
    assert answer.num_tokens == 7


def a_step(*token_ids: int, **parsed: object) -> Progress:
    return Progress(request_id=ID, token_ids=token_ids, parsed=ParsedDelta(**parsed))  # type: ignore[arg-type]


def a_call(index: int, name: str = "", arguments: str = "") -> CallDelta:
    return CallDelta(index=index, name=name, arguments=arguments)


@pytest.mark.parametrize(
    "begun", ["a", "<think>why", '<tool_call>\n{"name": "add", "arguments": {"y": "'], ids=["text", "reasoning", "call"]
)
def test_token_that_cannot_begin_a_delimiter_takes_two_calls(begun):
    """Count the Python calls for a token: two, which take less than a microsecond; an answer that is not parsed takes one."""
    answer = an_answer(JSON_CALLS, "")
    for character in begun:
        answer.take(Progress(request_id=ID, token_ids=(ord(character),)))
    steps = [Progress(request_id=ID, token_ids=(ord(character),)) for character in "word " * 40]

    with count_calls() as counted:
        for step in steps:
            answer.take(step)

    assert counted.calls <= 2 * len(steps) + 10, "the parser is asked only where a delimiter may begin"


@pytest.mark.parametrize(
    ("parsers", "own", "most"),
    [(JSON_CALLS, None, 5), (XML_CALLS, None, 5), (None, ALTERNATIVES, 4)],
    ids=["literals", "pattern", "alternatives"],
)
def test_token_that_may_begin_a_delimiter_takes_more(parsers, own, most):
    """Count the calls of all libraries, too, because the parser of `transformers` takes most of the time here."""
    answer = an_answer(parsers, "", own)
    answer.take(Progress(request_id=ID, token_ids=(ord("a"),)))
    tokens = re.findall(r"</?|\w+|>", "<b>word</b>" * 40)
    steps = [Progress(request_id=ID, token_ids=tuple(map(ord, token))) for token in tokens]

    with count_calls("") as counted:
        for step in steps:
            answer.take(step)

    assert counted.calls <= most * len(steps)


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        (ParsedDelta(text="word"), 1),
        (ParsedDelta(reasoning="word"), 1),
        (ParsedDelta(calls=(CallDelta(index=0, arguments="word"),)), 3),
    ],
    ids=["text", "reasoning", "call"],
)
def test_token_that_a_worker_has_parsed_takes_few_calls(parts, calls):
    answer = EngineParsedAnswer(ID)
    steps = [Progress(request_id=ID, token_ids=(7,), parsed=parts)] * 200

    with count_calls() as counted:
        for step in steps:
            answer.take(step)

    assert counted.calls <= calls * len(steps)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_reasoning_are_counted_apart_from_the_others(size):
    answer = an_answer(AnswerParsers(tool_calls="hermes", reasoning="qwen3"), "")
    text = f"<think>{'why not? ' * 10}</think>{'because ' * 10}{CALL}"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]

    parse(answer, pieces)

    characters = len("<think>") + 10 * len("why not? ")
    assert answer.num_tokens == len(text)
    assert abs(answer.reasoning_tokens - characters) <= size // 4 + 8  # a delimiter may count as reasoning or not


def test_reasoning_tokens_of_a_worker_follow_its_steps():
    answer = EngineParsedAnswer(ID)
    answer.take(a_step(1))  # a step without text counts like the next one
    answer.take(a_step(2, reasoning="why"))
    answer.take(a_step(3, reasoning="ab", text="cd"))  # one token for both parts: it counts half
    answer.take(a_step(4, text="so"))
    first = answer.reasoning_tokens
    answer.take(a_step(5))
    answer.take(a_step(6, calls=(a_call(0, "add", "{}"),)))

    assert (first, answer.reasoning_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ([{"reasoning": "why"}, {}, {}], 3),
        ([{"reasoning": "why"}, {"text": "so"}, {}], 1),
        ([{"reasoning": "why"}, {"calls": (a_call(0, "add", "{}"),)}, {}], 1),
        ([{}, {}], 0),
    ],
    ids=["reasoning", "text", "call", "nothing"],
)
def test_last_tokens_without_content_count_as_reasoning_in_it(parts, count):
    answer = EngineParsedAnswer(ID)
    for number, part in enumerate(parts):
        answer.take(a_step(number, **part))

    answer.finish()

    assert answer.reasoning_tokens == count


def test_step_of_several_tokens_has_one_part_for_each_call():
    """Client libraries take several parts with one index in one event for several calls."""
    answer = EngineParsedAnswer(ID)
    delta = answer.take(
        a_step(
            1,
            calls=(
                a_call(0, "add"),
                a_call(0, "", '{"x"'),
                a_call(0, "", ": 3}"),
                a_call(1, "sub", "{"),
                a_call(1, "", "}"),
            ),
        )
    )

    assert [(call.index, call.id, call.name, call.arguments) for call in delta.calls] == [
        (0, "call_r_0", "add", '{"x": 3}'),
        (1, "call_r_1", "sub", "{}"),
    ]


def test_worker_that_continues_an_answer_repeats_nothing():
    answer = EngineParsedAnswer(ID)
    first = [
        answer.take(a_step(1, reasoning="hm", from_start=True)),
        answer.take(a_step(2, text="so", calls=(a_call(0, "add", '{"x"'),))),
    ]

    replay = a_step(
        3, reasoning="hm", text="so", calls=(a_call(0, "add"), a_call(0, "", '{"x": 3}'), a_call(1, "add", "{}")), from_start=True
    )  # fmt: skip
    rest = [answer.take(replay), answer.finish()]

    assert "".join(delta.reasoning for delta in first + rest) == "hm"
    assert "".join(delta.text for delta in first + rest) == "so"
    calls = [call for delta in first + rest for call in delta.calls]
    assert [(call.id, call.name, call.arguments) for call in join_calls(calls)] == [
        ("call_r_0", "add", '{"x": 3}'),
        ("call_r_1", "add", "{}"),
    ]
    assert answer.num_tokens == 3


@pytest.mark.parametrize(
    "replay",
    [
        {"reasoning": "h", "text": "so", "calls": (a_call(0, "add", "{"),)},
        {"reasoning": "hm", "text": "no", "calls": (a_call(0, "add", "{"),)},
        {"reasoning": "hm", "text": "so"},
        {"reasoning": "hm", "text": "so", "calls": (a_call(0, "sub", "{"),)},
        {"reasoning": "hm", "text": "so", "calls": (a_call(0, "add", "["),)},
    ],
)
def test_worker_that_parses_the_beginning_differently_is_refused(replay):
    answer = EngineParsedAnswer(ID)
    answer.take(a_step(1, reasoning="hm", text="so", calls=(a_call(0, "add", "{"),), from_start=True))

    with pytest.raises(RequestRejected, match="parses the beginning of the answer differently") as refused:
        answer.take(a_step(2, from_start=True, **replay))

    assert refused.value.reason is Reason.WORKER_LOST


def test_log_of_a_malformed_answer_has_nothing_of_its_text(caplog):
    caplog.set_level("INFO")

    assert parse(an_answer(JSON_CALLS, ""), ['<tool_call>{"name": "secret']) == ("", '<tool_call>{"name": "secret', [])

    (record,) = [each for each in caplog.records if each.message.startswith("answer malformed")]
    assert "secret" not in str(vars(record))
    assert record.cause
