"""Tests of parsing plans for models that the router has no parser for."""

from typing import Any, ClassVar

from fleet.core.requests import AnswerParsing, ChatPrompt
from fleet.frontend.text.parsing_plan import ParsingPlans
from tests.support.builders import a_request
from tests.support.router.fake_router import a_model_card


class CodecOfModelWithTemplate:
    response_template: ClassVar[dict[str, Any]] = {}


def test_missing_parser_is_logged_once_for_each_model(caplog):
    plans = ParsingPlans()  # without `load`, as if no parser were installed
    request = a_request(prompt=ChatPrompt(()))

    for model in ("a", "b", "a", "a"):
        card = a_model_card(name=model)
        assert plans.plan(request, AnswerParsing(), card, CodecOfModelWithTemplate()) is None

    assert [(record.message, record.model) for record in caplog.records] == [
        ("reasoning stays in the text", "a"),
        ("reasoning stays in the text", "b"),
    ]
