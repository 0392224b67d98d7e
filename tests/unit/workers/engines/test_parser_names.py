"""Parser names: they follow from the model's chat template."""

import json

import pytest

from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import AnswerParsers
from workers.engines.parser_names import FAMILIES, parsers_for
from workers.settings import WorkerSettings


def settings(model_dir, **fields: str) -> WorkerSettings:
    return WorkerSettings(worker_id=WorkerId("w"), model=ModelName("m"), model_dir=str(model_dir), **fields)  # type: ignore[arg-type]


def write_template(folder, template: str, model_type: str = "llama", *, jinja: bool = True) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if jinja:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize("jinja", [True, False])
@pytest.mark.parametrize(
    ("template", "model_type", "parsers"),
    [
        ('{{ tools }}<tool_call>{"name": n, "arguments": a}</tool_call>', "qwen2", ("hermes", "")),
        ('{{ tools }}<tool_call>{"name": n, "arguments": a}</tool_call><think>', "qwen3", ("hermes", "qwen3")),
        ("{{ tools }}<tool_call><function=f><parameter=p>", "qwen3_moe", ("qwen3_coder", "")),
        ("{{ tools }}<tool_call><function=f><parameter=p><think>", "qwen3_5", ("qwen3_coder", "qwen3")),
        ("{{ tools }}[TOOL_CALLS]", "mistral", ("mistral", "")),
        ('{{ tools }}{"name": n, "parameters": d}', "llama", ("llama3_json", "")),
        ("{{ tools }}", "gpt_oss", ("openai", "openai_gptoss")),
        (
            "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜>\n```json<think>",
            "deepseek_v3",
            ("deepseek_v3", "deepseek_r1"),
        ),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁sep｜><think>", "deepseek_v3", ("deepseek_v31", "deepseek_v3")),
        ("{{ tools }}<tool_call>name<arg_key><think>", "glm4_moe", ("glm45", "glm45")),
        ("{{ tools }}<minimax:tool_call><think>", "minimax", ("minimax_m2", "minimax_m2")),
    ],
)
def test_template_shows_the_parsers(tmp_path, template, model_type, parsers, jinja):
    write_template(tmp_path, template, model_type, jinja=jinja)

    tool_calls, reasoning = parsers
    found = parsers_for(settings(tmp_path), in_engine=True)
    assert found == AnswerParsers(tool_calls=tool_calls, reasoning=reasoning, in_engine=True)


def test_model_with_a_response_template_is_parsed_by_it(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"response_template": {}, "chat_template": "[TOOL_CALLS]"})
    )

    assert parsers_for(settings(tmp_path), in_engine=True) == AnswerParsers(
        tool_calls="hf", reasoning="hf", in_engine=True
    )


def test_model_whose_template_shows_no_parser_has_none(tmp_path):
    write_template(tmp_path, "{{ messages }}")

    assert parsers_for(settings(tmp_path), in_engine=True) is None
    assert parsers_for(settings(""), in_engine=True) is None


def test_settings_win_over_the_template(tmp_path):
    write_template(tmp_path, "{{ tools }}[TOOL_CALLS]")

    named = parsers_for(settings(tmp_path, tool_call_parser="hermes", reasoning_parser="qwen3"), in_engine=False)
    assert named == AnswerParsers(tool_calls="hermes", reasoning="qwen3")
    assert parsers_for(settings(tmp_path, tool_call_parser="", reasoning_parser=""), in_engine=False) is None


def test_names_are_parsers_of_vllm():
    tool_parsers = pytest.importorskip("vllm.tool_parsers").ToolParserManager.list_registered()
    reasoning = pytest.importorskip("vllm.reasoning").ReasoningParserManager.list_registered()

    assert {family.tool_calls for family in FAMILIES} <= set(tool_parsers)
    assert {family.reasoning for family in FAMILIES} <= {*reasoning, ""}
