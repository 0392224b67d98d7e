"""Tests of docs/api.md: it lists each field and header that the code knows, with what happens to it."""

import json
import re
from pathlib import Path

import pytest

from fleet.frontend.openai.bodies import (
    ACCEPTED_VALUES,
    COMPLETION_FIELDS,
    HINT_HEADERS,
    ChatBody,
    CompletionBody,
    OpenAiBody,
)

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
OF_CHATS = {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"}
SECTIONS = {
    "Fields of both endpoints": (OpenAiBody, {*OpenAiBody.__struct_fields__} - COMPLETION_FIELDS),
    "Fields of completions": (
        CompletionBody,
        ({*CompletionBody.__struct_fields__} - {*OpenAiBody.__struct_fields__}) | COMPLETION_FIELDS,
    ),
    "Fields of chats": (
        ChatBody,
        ({*ChatBody.__struct_fields__} - {*OpenAiBody.__struct_fields__}) | COMPLETION_FIELDS,
    ),
}


def rows(title: str) -> list[list[str]]:
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = [each for each in section if each.startswith(f"{title}\n")]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def treatment(field: str, *, completion: bool) -> str | None:
    """Return what the table has to say; None: the field is read, and the table may call it ignored."""
    if field not in ACCEPTED_VALUES or (completion and field in COMPLETION_FIELDS):
        return None
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in ACCEPTED_VALUES[field])
    return f"only {accepted}" if accepted else "no"


@pytest.mark.parametrize("title", SECTIONS)
def test_page_lists_every_field_with_its_treatment(title):
    _, expected = SECTIONS[title]
    listed = {row[0].strip("`"): row[1] for row in rows(title)}

    assert listed.keys() == expected
    assert len(rows(title)) == len(listed), "a field is listed twice"
    for field, taken in listed.items():
        wanted = treatment(field, completion=title == "Fields of completions")
        if title == "Fields of completions" and field in OF_CHATS:
            assert taken == "no"
        elif wanted is None:
            assert taken in {"yes", "ignored"}, field
        else:
            assert taken == wanted, field


def test_page_lists_every_header_with_its_field():
    listed = [(row[0].strip("`"), row[1].strip("`")) for row in rows("Hints in headers")]

    assert listed == [(name.decode(), hint.field) for name, hint in HINT_HEADERS.items()]
