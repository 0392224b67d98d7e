"""Parser names: finds out which of vLLM's parsers fit a worker's model, from the worker's settings or the model folder.

Rules:

1. A parser that the settings name is used. If the setting is ``auto``, and the model folder has a response template,
   vLLM's parser for response templates is used. Otherwise the parser is chosen by the model type and by the chat
   template, because the chat template instructs the model how to write tool calls.
2. The first entry of `FAMILIES` that allows the model type, and whose marks all occur in the chat template, names the
   parsers. If no entry fits, the model has no parser. Requests with tools are then refused, because a wrong parser
   would not find the calls in the answers.
3. The reasoning parser of an entry is used only if the chat template contains the entry's `reasoning_mark`.
"""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import AnswerParsers
from workers.settings import WorkerSettings

AUTO = "auto"
OWN_TEMPLATE = "hf"
"""vLLM's name of the parser that reads the model's own response template (`response_template`)."""


class ModelFamily(Struct, frozen=True):
    """Names the parsers for models that write calls and reasoning in the same form, and says how to recognise the models."""

    tool_calls: str  # vLLM's name of the parser of tool calls; empty: there is none
    marks: tuple[str, ...]  # texts that all occur in the chat template of such a model (rule 2)
    model_types: tuple[str, ...] = ()  # values of `model_type` in config.json; empty: any type
    reasoning: str = ""  # vLLM's name of the parser of reasoning; empty: there is none
    reasoning_mark: str = "<think>"


FAMILIES = (
    ModelFamily("openai", (), ("gpt_oss",), "openai_gptoss", ""),
    ModelFamily("kimi_k2", ("<|tool_calls_section_begin|>",), (), "kimi_k2"),
    ModelFamily("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), (), "deepseek_r1"),
    ModelFamily("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), (), "deepseek_v3"),
    ModelFamily("minimax_m2", ("<minimax:tool_call>",), (), "minimax_m2"),
    ModelFamily("seed_oss", ("<seed:tool_call>",), (), "seed_oss", "<seed:think>"),
    ModelFamily("mistral", ("[TOOL_CALLS]",), (), "mistral", "[THINK]"),
    ModelFamily("glm45", ("<arg_key>",), ("glm4_moe", "glm4v_moe", "glm4_moe_lite", "glm_moe_dsa"), "glm45"),
    ModelFamily("step3p5", ("<function=", "<parameter="), ("step3p5", "step3_5"), "step3p5"),
    ModelFamily("qwen3_coder", ("<function=", "<parameter="), ("nemotron_h",), "nemotron_v3"),
    ModelFamily("qwen3_coder", ("<function=", "<parameter="), (), "qwen3"),
    ModelFamily("gemma4", ("<|tool_call>",), (), "gemma4", "<|channel>"),
    ModelFamily("functiongemma", ("<start_function_call>",)),
    ModelFamily("cohere_command3", ("<|START_ACTION|>",), (), "cohere_command3", "<|START_THINKING|>"),
    ModelFamily("granite4", ("<tool_call>",), ("granitemoehybrid",)),
    ModelFamily("granite", ("<|tool_call|>",), (), "granite", "Here is my thought process"),
    ModelFamily("phi4_mini_json", ("<|tool_call|>",), ("phi3",)),
    ModelFamily("ernie45", ("<tool_call>",), ("ernie4_5_moe",), "ernie45"),
    ModelFamily("hunyuan_a13b", ("<tool_calls>",), ("hunyuan_v1_moe", "hunyuan_v1_dense"), "hunyuan_a13b", "<think>"),
    ModelFamily("jamba", ("<tool_calls>",), ("jamba",)),
    ModelFamily("lfm2", ("<|tool_call_start|>",)),
    ModelFamily("internlm", ("<|action_start|>",)),
    ModelFamily("olmo3", ("<function_calls>",), (), "olmo3"),
    ModelFamily("longcat", ("<longcat_tool_call>",)),
    ModelFamily("llama4_pythonic", ("tools",), ("llama4",)),
    ModelFamily("llama3_json", ("tools", '"parameters": '), ("llama",)),
    ModelFamily("hermes", ("<tool_call>", "QwQ"), (), "deepseek_r1"),
    ModelFamily("hermes", ("<tool_call>",), ("qwen3", "qwen3_moe", "qwen3_next"), "qwen3"),
    ModelFamily("hermes", ("<tool_call>", '"arguments": '), (), "deepseek_r1"),
)
"""The known families. The first family that fits is used, so more specific families come first. The parser names are
vLLM's (docs.vllm.ai, tool calling)."""


def parsers_for(settings: WorkerSettings, *, in_engine: bool) -> AnswerParsers | None:
    """Return the names of the parsers for a worker's answers, or None if the answers are not parsed.

    Args:
        settings: Settings of the worker.
        in_engine: True if the engine parses the answers, False if the router does.

    Raises:
        ConfigurationRefused: The chat template or a JSON file of the model folder cannot be read or decoded.
    """
    tool_calls, reasoning = settings.tool_call_parser, settings.reasoning_parser
    if AUTO in (tool_calls, reasoning):
        found = _family(settings.model_dir)
        tool_calls = found.tool_calls if tool_calls == AUTO else tool_calls
        reasoning = found.reasoning if reasoning == AUTO else reasoning
    if not tool_calls and not reasoning:
        return None
    return AnswerParsers(tool_calls=tool_calls, reasoning=reasoning, in_engine=in_engine)


def _family(model_dir: str) -> ModelFamily:
    """Return the model family of a model folder; if no entry of `FAMILIES` fits, the family has no parsers."""
    folder = Path(model_dir)
    if model_dir and "response_template" in _read(folder / "tokenizer_config.json"):
        return ModelFamily(OWN_TEMPLATE, (), (), OWN_TEMPLATE)
    template = _template(folder) if model_dir else ""
    model_type = _read(folder / "config.json").get("model_type", "") if model_dir else ""
    if template or model_type:
        for family in FAMILIES:
            if family.model_types and model_type not in family.model_types:
                continue
            if all(mark in template for mark in family.marks):
                reasons = family.reasoning and family.reasoning_mark in template
                return family if reasons else ModelFamily(family.tool_calls, family.marks)
    return ModelFamily("", ())


def _template(folder: Path) -> str:
    """Return the text of chat_template.jinja, or without this file, of all chat templates in tokenizer_config.json."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        return json.dumps(
            _read(folder / "tokenizer_config.json").get("chat_template") or "", ensure_ascii=False
        ).replace('\\"', '"')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationRefused(f"{folder}/chat_template.jinja: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"{path}: {error}") from error
    return content if isinstance(content, dict) else {}
