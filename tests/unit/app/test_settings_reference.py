"""Tests of the generated page of all settings."""

from pathlib import Path

from fleet.app.settings_reference import KINDS, reference, settings_keys

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_page_of_settings_is_what_the_types_give():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make chart`"


def test_page_of_settings_explains_nested_sections():
    page = reference()

    assert "| `max_queue_seconds` | `10.0` |" in page
    assert "`watchdog.floor_seconds`" in page


def test_every_key_of_every_settings_file_has_a_meaning():
    keys = [(part, key) for part, kind in KINDS.items() for key in settings_keys(kind)]

    assert [f"{part}: {key.path}" for part, key in keys if not key.meaning] == []


def test_kinds_of_sections_are_listed_with_their_values():
    page = reference()

    assert (
        "| `source.kind` | required | Selects the other keys of the section: `routers`, `metrics` or `prometheus`. |"
        in page
    )
    assert "section `source` (RouterDemandSettings, kind routers)" in page
    assert "engines.NAME.kind" in [key.path for key in settings_keys(KINDS["planner"])]
