"""Benchmark of the CPU time that the router needs to parse answers with tool calls and reasoning.

    python -m loadtests.router.parsing_cost [--rounds 30] [--most-us 2] [--json FILE]

Rules:

1. A step of an engine gives one token. The baseline turns the same steps into text and parses nothing, as for requests
without tools. The cost is the difference, in microseconds per token.
2. Times are CPU time of this thread. In each round, the baseline and all cases run in turn. The median of the rounds counts,
   and the quartiles show the spread.
3. Text with markup is the difficult case: each tag begins with `<`, like the delimiters that the parser looks for (`<tool_call>`).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.ids import RequestId
from fleet.core.requests import AnswerParsers, CallDelta, Delta
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.parsed_answer import EngineParsedAnswer, TemplateParsedAnswer
from fleet.frontend.text.response_templates import ResponseTemplates
from loadtests import host

ID = RequestId("r")
WORDS = ("word", " and", " so", ".") * 500
MARKUP = ("<", "b", ">", "word", "</", "b", ">", " or") * 250
HERMES = AnswerParsers(tool_calls="hermes", reasoning="qwen3")
QWEN_CODER = AnswerParsers(tool_calls="qwen3_coder", reasoning="qwen3")
CALL = {"content": "json", "repeats": True, "transform": {"type": "function", "function": "{content}"}}
OWN_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {"open_pattern": "<call>|(?:CALL|TOOL):", "close_pattern": r"</call>|;\s", **CALL},
    },
}


class ParsingCost(Struct, frozen=True):
    """Cost of parsing a token of one kind of answer, in microseconds of CPU time."""

    answer: str
    median_us: float
    quartiles_us: tuple[float, float]


class _Texts:
    """Decoder whose token ids are positions in a list of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def add(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


class _Case(Struct, frozen=True):
    """One kind of answer: the texts of its tokens, the text before them (`begun`), and how it is parsed."""

    texts: Sequence[str]
    begun: str = ""
    parsers: AnswerParsers | None = HERMES
    template: Mapping[str, Any] | None = None
    parsed: ParsedDelta | None = None  # the delta that the engine has parsed for each token; None: the router parses


CASES = {
    "parsed by the engine, text": _Case(WORDS, parsed=ParsedDelta(text="word")),
    "parsed by the engine, call": _Case(WORDS, parsed=ParsedDelta(calls=(CallDelta(index=0, arguments="word"),))),
    "hermes, words": _Case(WORDS),
    "hermes, markup": _Case(MARKUP),
    "hermes, markup in reasoning": _Case(MARKUP, begun="<think>so"),
    "hermes, markup in a call": _Case(MARKUP, begun='<tool_call>\n{"name": "add", "arguments": {"y": "'),
    "qwen3_coder, words": _Case(WORDS, parsers=QWEN_CODER),
    "qwen3_coder, markup": _Case(MARKUP, parsers=QWEN_CODER),
    "qwen3_coder, markup in a call": _Case(
        MARKUP, begun="<tool_call>\n<function=add>\n<parameter=y>\n", parsers=QWEN_CODER
    ),
    "own template with alternatives, words": _Case(WORDS, parsers=None, template=OWN_TEMPLATE),
    "own template with alternatives, markup": _Case(MARKUP, parsers=None, template=OWN_TEMPLATE),
}
"""The measured kinds of answers, by their names in the output."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each kind of answer (default 30)")
    parser.add_argument("--most-us", type=float, help="exit with 1 if the median of a kind of answer is above this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds: {arguments.rounds} is not above 0")
    costs = measured(arguments.rounds)
    for cost in costs:
        low, high = cost.quartiles_us
        print(f"{cost.answer:40} {cost.median_us:6.2f} us a token (quartiles {low:.2f} to {high:.2f})")
    facts = host.facts(Path.cwd(), ("fleet-serving", "transformers", "regex"))
    print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, {facts['versions']}")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode({"host": facts, "costs": costs})))
    if arguments.most_us is not None and (late := [cost for cost in costs if cost.median_us > arguments.most_us]):
        print(
            f"loadtests.router.parsing_cost: above {arguments.most_us} us a token: {', '.join(cost.answer for cost in late)}",
            file=sys.stderr,
        )
        return 1
    return 0


def measured(rounds: int) -> list[ParsingCost]:
    """Return the cost of parsing for each kind of answer (rules 1 and 2)."""
    templates = ResponseTemplates()
    templates.load()
    differences: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, case in CASES.items():
            steps = [
                Progress(request_id=ID, token_ids=(index,), parsed=case.parsed) for index in range(len(case.texts))
            ]
            plain = AnswerText(_Texts(case.texts), end_token_ids=frozenset())
            baseline = _seconds(lambda step, plain=plain: plain.add(step.token_ids, step.logprobs), steps)  # type: ignore[misc]
            parsing = _seconds(_take(case, templates), steps)
            differences[name].append((parsing - baseline) * 1e6 / len(steps))
    return [ParsingCost(name, statistics.median(values), _quartiles(values)) for name, values in differences.items()]


def _take(case: _Case, templates: ResponseTemplates) -> Callable[[Progress], Delta]:
    """Return a function that parses further steps of a new answer, whose beginning (`case.begun`) it has parsed already."""
    if case.parsed is not None:
        return EngineParsedAnswer(ID).take
    template = templates.compiled(repr(case), case.template, case.parsers)
    assert template is not None
    begun = [case.begun] if case.begun else ["so"]
    text = AnswerText(_Texts([*case.texts, *begun]), end_token_ids=frozenset())
    answer = TemplateParsedAnswer(ID, text, template, prompt="", tools=[])
    answer.take(Progress(request_id=ID, token_ids=(len(case.texts),)))
    return answer.take


def _seconds(take: Callable[[Progress], Delta], steps: Sequence[Progress]) -> float:
    begin = time.thread_time()
    for step in steps:
        take(step)
    return time.thread_time() - begin


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


if __name__ == "__main__":
    sys.exit(main())
