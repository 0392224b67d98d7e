"""vLLM's parsers in a worker: streams equal whole answers for many model families, however steps and tokens are cut."""

import json
import re
import tempfile
import warnings
from contextlib import suppress
from copy import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs
from tokenizers import AddedToken, Tokenizer, decoders, models

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import AnswerParsers, JsonSchema, Sampling, ToolCall, ToolChoice, join_calls
from fleet.core.work import ParsingTask, Progress, Start, Step
from fleet.frontend.text.parsed_answer import EngineParsedAnswer
from fleet.local.tiny_model import build_tiny_model
from fleet.wire.worker import encode_worker_message
from tests.support.builders import a_start, token_bytes
from workers.engines.vllm.answer_parser import VllmAnswerParser, VllmAnswerParsers, check_names
from workers.settings import VllmSettings, WorkerSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    bytes_to_unicode = pytest.importorskip("transformers.convert_slow_tokenizer").bytes_to_unicode
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    DeltaMessage = pytest.importorskip("vllm.entrypoints.generate.base.protocol").DeltaMessage
ChatCompletionRequest = protocol.ChatCompletionRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

ID = RequestId("r")
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                    "required": ["city", "days"],
                },
            },
        }
        for name in ("weather", "forecast")
    ]
)
ARGUMENTS = {"city": "Łódź <b>", "days": 3}
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
OBJECT = f'{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}'
OTHER = '{"name": "forecast", "arguments": {"city": "Ghent", "days": 1}}'
WEATHER = ("weather", ARGUMENTS)
FORECAST = ("forecast", {"city": "Ghent", "days": 1})


class Family(Struct, frozen=True):
    """A family of models, with answers as they write them."""

    tool_calls: str
    special: tuple[str, ...]  # special tokens
    answers: tuple[tuple[str, str, str, tuple[Any, ...]], ...]  # text, reasoning, content, calls
    reasoning: str = ""
    end: str = "</s>"  # token that ends an answer


def xml_call(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        + "</function>"
    )


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
# Tokens of the format Harmony, which gpt-oss writes.
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
ANALYSIS = "<|channel|>analysis<|message|>rain?<|end|><|start|>assistant"
HARMONY_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON_ARGUMENTS}"
HARMONY_OTHER = '<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{"city": "Ghent", "days": 1}'
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")

FAMILIES = (
    Family("hermes", CALL, (
        ("plain words", "", "plain words", ()),
        (f"<tool_call>\n{OBJECT}\n</tool_call>", "", "", (WEATHER,)),
        (f"One moment. <tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>", "", "One moment. ", (WEATHER, FORECAST)),
    )),
    Family("hermes", (*CALL, *THINK), (
        (f"rain?</think>\n\n<tool_call>\n{OBJECT}\n</tool_call>", "rain?", "", (WEATHER,)),
        ("rain?</think>\n\nYes.", "rain?", "Yes.", ()),
    ), "qwen3"),
    Family("qwen3_coder", (*CALL, *THINK), (
        (f"hm</think>\n\n<tool_call>\n{xml_call(*WEATHER)}\n</tool_call>", "hm", "", (WEATHER,)),
        (f"hm</think>\n\nWait.<tool_call>\n{xml_call(*WEATHER)}\n</tool_call>\n<tool_call>\n{xml_call(*FORECAST)}\n</tool_call>", "hm", "Wait.", (WEATHER, FORECAST)),
    ), "qwen3"),
    Family("hermes", (*CALL, *THINK), (
        (f"<think>rain?</think>\n<tool_call>\n{OBJECT}\n</tool_call>", "rain?", "", (WEATHER,)),
    ), "deepseek_r1"),
    Family("llama3_json", ("<|python_tag|>",), (
        (f'{{"name": "weather", "parameters": {JSON_ARGUMENTS}}}', "", "", (WEATHER,)),
        ("It rains.", "", "It rains.", ()),
    )),
    Family("mistral", ("[TOOL_CALLS]",), (
        (f"[TOOL_CALLS][{OBJECT}]", "", "", (WEATHER,)),
        (f"[TOOL_CALLS][{OBJECT}, {OTHER}]", "", "", (WEATHER, FORECAST)),
    )),
    Family("deepseek_v3", DEEPSEEK, (
        (f"{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}weather\n```json\n{JSON_ARGUMENTS}\n```{DEEPSEEK[3]}{DEEPSEEK[1]}", "", "", (WEATHER,)),
    )),
    Family("deepseek_v31", DEEPSEEK, (
        (f"Ok.{DEEPSEEK[0]}{DEEPSEEK[2]}weather{DEEPSEEK[4]}{JSON_ARGUMENTS}{DEEPSEEK[3]}{DEEPSEEK[1]}", "", "Ok.", (WEATHER,)),
    )),
    Family("kimi_k2", (*KIMI, *THINK), (
        (f"why</think>Ok.{KIMI[0]}{KIMI[2]}functions.weather:0{KIMI[3]}{JSON_ARGUMENTS}{KIMI[4]}{KIMI[1]}", "why", "Ok.", (WEATHER,)),
    ), "kimi_k2"),
    Family("glm45", (*CALL, *THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), (
        ("<think>why</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź <b></arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "why", "", (WEATHER,)),
    ), "glm45"),
    Family("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>", *THINK), (
        ('why</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Łódź <b></parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>', "why", "", (WEATHER,)),
    ), "minimax_m2"),
    Family("seed_oss", ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"), (
        (f"<seed:think>why</seed:think>\n<seed:tool_call>\n{xml_call(*WEATHER)}\n</seed:tool_call>", "why", "", (WEATHER,)),
    ), "seed_oss"),
    Family("granite4", CALL, ((f"<tool_call>\n{OBJECT}\n</tool_call>", "", "", (WEATHER,)),)),
    Family("pythonic", (), (
        ('[weather(city="Łódź <b>", days=3), forecast(city="Ghent", days=1)]', "", "", (WEATHER, FORECAST)),
    )),
    Family("llama4_pythonic", ("<|python_start|>", "<|python_end|>"), (
        ('[weather(city="Łódź <b>", days=3)]', "", "", (WEATHER,)),
    )),
    Family("jamba", ("<tool_calls>", "</tool_calls>"), ((f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>", "", "", (WEATHER,)),)),
    Family("longcat", ("<longcat_tool_call>", "</longcat_tool_call>"), (
        (f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>", "", "", (WEATHER,)),
    )),
    Family("step3p5", (*CALL, *THINK), ((f"hm</think>\n<tool_call>\n{xml_call(*WEATHER)}\n</tool_call>", "hm", "", (WEATHER,)),), "step3p5"),
    Family("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>"), (
        ('<|tool_call_start|>[weather(city="Łódź <b>", days=3)]<|tool_call_end|>Done.', "", "Done.", (WEATHER,)),
    )),
    Family("openai", HARMONY, (
        (f"{ANALYSIS}<|channel|>final<|message|>Yes: Łódź <b>.", "rain?", "Yes: Łódź <b>.", ()),
        ("<|channel|>final<|message|>No words before.", "", "No words before.", ()),
    ), "openai_gptoss", "<|return|>"),
    Family("openai", HARMONY, (
        (f"{ANALYSIS}{HARMONY_CALL}", "rain?", "", (WEATHER,)),
        # The recipient before the channel, as the model writes it after some prompts.
        (f"{ANALYSIS} to=functions.weather<|channel|>commentary json<|message|>{JSON_ARGUMENTS}", "rain?", "", (WEATHER,)),
        (f"{ANALYSIS}<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant{HARMONY_CALL}", "rain?", "One moment.", (WEATHER,)),
        (f"{ANALYSIS}{HARMONY_CALL}<|call|><|start|>assistant{HARMONY_OTHER}", "rain?", "", (WEATHER, FORECAST)),
    ), "openai_gptoss", "<|call|>"),
)  # fmt: skip
CASES = [
    pytest.param(family, *answer, id=f"{family.tool_calls}-{family.reasoning or 'plain'}-{family.end}-{index}")
    for family in FAMILIES
    for index, answer in enumerate(family.answers)
]


@cache
def tiny_folder() -> Path:
    return build_tiny_model(Path(tempfile.mkdtemp()), tokenizer_only=True)


@cache
def harmony() -> Any:
    """Return the vocabulary of gpt-oss, which openai-harmony contains."""
    return pytest.importorskip("openai_harmony").load_harmony_encoding("HarmonyGptOss")


def harmony_tokenizer() -> Any:
    """Return a tokenizer that decodes the tokens of gpt-oss. `harmony` encodes, because there are no merges here."""
    vocabulary = harmony()
    letters = bytes_to_unicode()
    tokens = {}
    for token_id in range(max(vocabulary.stop_tokens()) + 1):
        text = vocabulary.decode([token_id], errors="surrogateescape")  # many tokens are parts of a character
        tokens["".join([letters[byte] for byte in text.encode(errors="surrogateescape")])] = token_id
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<|endoftext|>"))
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>")


def parsers_of(family: Family) -> VllmAnswerParsers:
    return _parsers(family.tool_calls, family.reasoning, family.special)


@cache
def _parsers(tool_calls: str, reasoning: str, special: tuple[str, ...]) -> VllmAnswerParsers:
    if special == HARMONY:
        tokenizer = harmony_tokenizer()
    else:
        backend = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    # DeepSeek's marks are tokens that are not special.
    tokenizer.add_tokens([AddedToken(mark, special="｜" not in mark, normalized=False) for mark in special])
    names = AnswerParsers(tool_calls=tool_calls, reasoning=reasoning, in_engine=True)
    return VllmAnswerParsers(names, tokenizer, None, model_type="gpt_oss" if special == HARMONY else "")


def encoded(family: Family, text: str) -> list[int]:
    if family.special == HARMONY:
        return list(harmony().encode(text, allowed_special="all"))
    return parsers_of(family).tokenizer.encode(text, add_special_tokens=False)


def an_attempt(family: Family, tokens: list[int], **fields: Any) -> Start:
    task = ParsingTask(**{"tools": TOOLS, **fields})
    sampling = Sampling(max_tokens=500, stop_token_ids=tuple(encoded(family, family.end)))
    return a_start(tokens=token_bytes(tokens), sampling=sampling, parsing=task)


def opened(family: Family, tokens: list[int], *, begun: int = 0, **fields: Any) -> VllmAnswerParser:
    start = structs.replace(an_attempt(family, tokens, **fields), generated_tokens=begun)
    return parsers_of(family).open(start, start.parsing)


PROMPT = [7, 8, 9]


def parts_of(
    family: Family, tokens: list[int], cuts: list[int], lost_at: int | None = None, **fields: Any
) -> tuple[str, str, list[ToolCall]]:
    """Parse tokens in steps; after `lost_at` of them another worker continues."""
    answer = EngineParsedAnswer(ID)
    parser = opened(family, PROMPT, **fields)
    deltas = []
    for begin, end in pairwise([0, *sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]):
        if lost_at is not None and begin >= lost_at:
            parser, lost_at = opened(family, [*PROMPT, *tokens[:begin]], begun=begin, **fields), None
        step = tokens[begin:end]
        _, parsed = parser.add(step, is_finished=end == len(tokens))
        progress = Progress(request_id=ID, token_ids=tuple(step), parsed=parsed)
        encode_worker_message(Step(progress=(progress,)))
        deltas.append(answer.take(progress))
    calls = join_calls(call for delta in deltas for call in delta.calls)
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.name for call in calls)
    return "".join(delta.reasoning for delta in deltas), "".join(delta.text for delta in deltas), calls


def streamed(family: Family, tokens: list[int], cuts: list[int], **fields: Any) -> tuple[str, str, tuple[Any, ...]]:
    """Parse tokens in steps; return the calls without their ids, which are random."""
    reasoning, text, calls = parts_of(family, tokens, cuts, **fields)
    return reasoning, text, tuple((call.name, json.loads(call.arguments)) for call in calls)


def trimmed(result: Any) -> Any:
    """Return a result without white space around its parts, of which parsers keep more or less."""
    reasoning, text, calls = result
    return reasoning.strip(), text.strip(), calls


@pytest.mark.parametrize(("family", "text", "reasoning", "content", "calls"), CASES)
def test_streamed_parts_are_those_of_the_whole_answer(family, text, reasoning, content, calls):
    tokens = encoded(family, text + family.end)

    one_by_one = streamed(family, tokens, list(range(len(tokens))))

    assert trimmed(one_by_one) == (reasoning.strip(), content.strip(), calls)
    assert streamed(family, tokens, []) == one_by_one
    for cut in range(1, len(tokens)):
        assert streamed(family, tokens, [cut]) == one_by_one
        assert streamed(family, tokens, [cut], lost_at=cut) == one_by_one


def tokens_of(family: Family, text: str, cuts: list[int]) -> list[int]:
    """Return tokens of a text that begin at the cuts. The family's special tokens stay whole, as models write them."""
    marks = "|".join(map(re.escape, family.special)) or "(?!)"
    tokens: list[int] = []
    position = 0
    for part in re.split(f"({marks})", text):
        inside = (
            [cut for cut in sorted(cuts) if position < cut < position + len(part)] if part not in family.special else []
        )
        for begin, end in pairwise([position, *inside, position + len(part)]):
            tokens += encoded(family, text[begin:end])
        position += len(part)
    return [*tokens, *encoded(family, family.end)]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([case.values for case in CASES]), st.lists(st.integers(0, 300), max_size=40))
def test_parts_do_not_depend_on_how_text_is_cut_into_tokens(case, cuts):
    family, text, reasoning, content, calls = case
    tokens = tokens_of(family, text, cuts)

    assert trimmed(streamed(family, tokens, list(range(len(tokens))))) == (reasoning.strip(), content.strip(), calls)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=12),
    st.lists(st.integers(0, 100), max_size=5),
    st.integers(0, 100),
)
def test_malformed_output_is_parsed_alike_however_it_is_cut(family, pieces, cuts, lost_at):
    """Output is put together from pieces of good answers, and may end anywhere."""
    fragments = [
        *family.special,
        '{"',
        "}",
        "[",
        "\ufffd",
        '"\\ud83d"',
        "<",
        "null",
        *re.findall(r"\w+|\W", family.answers[-1][0]),
    ]
    tokens = [token for piece in pieces for token in encoded(family, fragments[piece % len(fragments)])]
    tokens = tokens or [2]

    def outcome(cuts: list[int], lost_at: int | None = None) -> Any:
        reasoning, text, calls = parts_of(family, tokens, cuts, lost_at)
        return reasoning, text, [(call.name, call.arguments) for call in calls]

    whole = outcome(list(range(len(tokens))))
    assert outcome([]) == whole
    assert outcome(cuts) == whole
    assert outcome(cuts, lost_at % len(tokens)) == whole


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.tool_calls}-{family.reasoning}")
def test_half_a_surrogate_pair_in_arguments_can_be_sent(family):
    """The parts of the answer are encoded as the worker sends them."""
    text = re.sub(r'": ?"[^"<]+"', '": "\\\\ud83d"', family.answers[-1][0])
    tokens = encoded(family, text)

    for cuts in ([], list(range(len(tokens)))):
        _, content, calls = parts_of(family, tokens, cuts)
        json.dumps([content, [(call.name, call.arguments) for call in calls]], ensure_ascii=False).encode()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.tool_calls}-{family.reasoning}")
def test_answer_that_is_cut_within_a_call_never_fails(family):
    text = family.answers[-1][0]
    tokens = encoded(family, text)

    for length in range(1, len(tokens)):
        parser = opened(family, PROMPT)
        _, parsed = parser.add(tokens[:length], is_finished=True, is_cut=True)
        assert parsed is not None


class BrokenParser:
    """Parser that fails at its third token, and else passes text."""

    reasoning_parser = None

    def __init__(self) -> None:
        self.seen = 0

    def set_prompt_token_ids(self, prompt_token_ids: list[int]) -> None: ...

    def parse_delta(self, delta_text: str, *arguments: Any, finished: bool) -> DeltaMessage:
        self.seen += 1
        if self.seen > 2:
            raise ZeroDivisionError
        return DeltaMessage(content=delta_text)


def test_parser_that_fails_passes_the_rest_as_text():
    family = FAMILIES[0]
    start = an_attempt(family, PROMPT)
    request = ChatCompletionRequest(messages=[])
    backend = parsers_of(family).tokenizer.backend_tokenizer
    parser = VllmAnswerParser(start, start.parsing, BrokenParser(), request, backend, {}, None)

    _, parsed = parser.add([*encoded(family, "one two three four"), 1], is_finished=True)

    assert parsed.text == "one two three four"


def test_stop_string_ends_the_answer():
    family = FAMILIES[0]
    tokens = encoded(family, "one two three four")

    taken, parsed = opened(family, PROMPT, stop=("two",)).add(tokens, is_finished=False)

    assert (parsed.text, parsed.stopped) == ("one ", True)
    assert taken < len(tokens)


DEMANDS = [
    {"tool_choice": ToolChoice.REQUIRED},
    {"tool_choice": ToolChoice.NAMED, "function": "forecast"},
]


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.tool_calls}-{family.reasoning}")
def test_demanded_calls_are_enforced_by_structured_output(family, demand):
    outputs = opened(family, PROMPT, **demand).structured_outputs

    enforced = json.dumps(msgspec.to_builtins(outputs.structural_tag or outputs.json), ensure_ascii=False)
    is_named = demand["tool_choice"] is ToolChoice.NAMED
    assert "days" in enforced
    assert "forecast" in enforced or (is_named and outputs.json)  # or the arguments alone are generated
    assert ("weather" in enforced) != is_named


def test_schema_of_the_answer_stays_beside_optional_tools():
    family = FAMILIES[0]
    start = structs.replace(an_attempt(family, PROMPT), sampling=Sampling(form=JsonSchema('{"type": "integer"}')))

    outputs = parsers_of(family).open(start, start.parsing).structured_outputs

    assert outputs.json == '{"type": "integer"}'


def test_answer_without_tools_is_parsed_for_reasoning_alone():
    family = FAMILIES[3]
    text = "<think>rain?</think>Yes. [TOOL_CALLS]"
    tokens = encoded(family, text + family.end)

    assert trimmed(streamed(family, tokens, [], tools="", tool_choice=ToolChoice.NONE))[:2] == (
        "rain?",
        "Yes. [TOOL_CALLS]",
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "wizard"},
        {"type": "object", "properties": 3},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/missing"}}},
        {"type": ["object", 3]},
        {"anyOf": 5},
    ],
)
@pytest.mark.parametrize("demand", [{}, *DEMANDS])
def test_malformed_schema_is_refused_or_left_to_the_engine(parameters, demand):
    tools = json.dumps([{"type": "function", "function": {"name": "forecast", "parameters": parameters}}])

    for family in FAMILIES:
        with suppress(ValueError):  # nothing else
            opened(family, PROMPT, tools=tools, **demand)


def worker_settings(**fields: Any) -> WorkerSettings:
    return WorkerSettings(worker_id=WorkerId("w"), model=ModelName("m"), **fields)


def test_unknown_parser_is_refused_by_its_setting():
    check_names(worker_settings(tool_call_parser="hermes", reasoning_parser=""))
    with pytest.raises(ConfigurationRefused, match=r"tool_call_parser: 'hermit' is none of vLLM's parsers: .*hermes"):
        check_names(worker_settings(tool_call_parser="hermit"))
    with pytest.raises(ConfigurationRefused, match="reasoning_parser: 'qwen3' needs the model's tokenizer"):
        check_names(worker_settings(reasoning_parser="qwen3", vllm=VllmSettings(keeps_forms=False)))


def test_found_parser_without_its_tokens_is_left_out():
    tokenizer = parsers_of(FAMILIES[0]).tokenizer  # it has no <think>
    names = AnswerParsers(tool_calls="hermes", reasoning="deepseek_r1", in_engine=True)

    found = VllmAnswerParsers.fitting(names, worker_settings(), tokenizer, None, model_type="")
    assert found.names == AnswerParsers(tool_calls="hermes", in_engine=True)
    with pytest.raises(ConfigurationRefused, match="reasoning_parser: "):
        VllmAnswerParsers.fitting(
            names, worker_settings(reasoning_parser="deepseek_r1"), tokenizer, None, model_type=""
        )


def test_named_parser_stays_if_the_found_one_does_not_fit():
    tokenizer = parsers_of(FAMILIES[0]).tokenizer  # it has no <think>
    names = AnswerParsers(tool_calls="hermes", reasoning="deepseek_r1", in_engine=True)
    settings = worker_settings(tool_call_parser="hermes")

    found = VllmAnswerParsers.fitting(names, settings, tokenizer, None, model_type="")

    assert found.names == AnswerParsers(tool_calls="hermes", in_engine=True)


def test_error_names_the_one_of_two_parsers_that_does_not_fit():
    tokenizer = parsers_of(FAMILIES[0]).tokenizer  # it has no <think>
    names = AnswerParsers(tool_calls="hermes", reasoning="deepseek_r1", in_engine=True)
    settings = worker_settings(tool_call_parser="hermes", reasoning_parser="deepseek_r1")

    with pytest.raises(ConfigurationRefused, match=r"reasoning_parser: .*think"):
        VllmAnswerParsers.fitting(names, settings, tokenizer, None, model_type="")


def test_named_parsers_that_only_fit_alone_are_refused():
    tokenizer = copy(parsers_of(FAMILIES[0]).tokenizer)
    fields = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {}}
    tokenizer.response_template = {"version": 1, "start_anchor": "<s>", "fields": fields}
    names = AnswerParsers(tool_calls="hermes", reasoning="hf", in_engine=True)
    settings = worker_settings(tool_call_parser="hermes", reasoning_parser="hf")

    with pytest.raises(ConfigurationRefused, match=r"tool_call_parser: .*hf parser cannot be combined"):
        VllmAnswerParsers.fitting(names, settings, tokenizer, None, model_type="")
