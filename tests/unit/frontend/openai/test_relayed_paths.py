"""Tests of the paths of external servers that clients may reach."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.frontend.openai.relayed_paths import CONTROL_ROUTES, PLACED, PathClass, RelayedPaths
from fleet.router.settings.router import DEFAULT_EXTERNAL_PATHS

PATHS = RelayedPaths.of(DEFAULT_EXTERNAL_PATHS)


@pytest.mark.parametrize(
    "path",
    [
        *sorted(PLACED),
        "/v1/responses/resp_1/cancel",
        "/v1/audio/transcriptions",
        "/v1/models/org%2Fname",
        "/v1/files/a b;c.txt",
        "/v2/embed",
        "/V1/Files",
    ],
)
def test_paths_of_the_api_are_relayed(path):
    assert PATHS.classify(path) is PathClass.RELAYED


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/sleep", "/collective_rpc", "/metrics", "/v2/files", "/v11/x", "v1/x", "*"]
)
def test_other_paths_are_unknown(path):
    assert PATHS.classify(path) is PathClass.UNKNOWN


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/%6Coad_lora_adapter",
        "/v1/LOAD_LORA_ADAPTER",
        "/v1/load_lora_adapter;x=1",
        "/v1/x%2Fload_lora_adapter",
        "/v1/organization/admin_api_keys",
    ],
)
def test_control_routes_are_recognized_in_any_spelling(path):
    assert PATHS.classify(path) is PathClass.CONTROL


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep",
        "/v1/..",
        "/v1/%2e%2e/sleep",
        "/v1/.%2E/sleep",
        "/v1/..%2fsleep",
        "/v1/..;/sleep",
        "/v1//sleep",
        "/v1/./sleep",
        "/v1/..%5csleep",
        "/v1/..\\sleep",
        "/v1/%252e%252e/sleep",
        "/v1/x%00",
        "/v1/x%0d%0aGET",
    ],
)
def test_paths_that_servers_read_differently_are_refused(path):
    assert PATHS.classify(path) is PathClass.AMBIGUOUS


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/%63ompletions",
        "/V1/Chat/completions",
        "/v1/chat/completions;x=1",
        "/v1/%72erank",
        "/SCORE",
        "/v1/score/",
    ],
)
def test_placed_paths_are_relayed_in_one_spelling_only(path):
    """A server may read the other spellings, too, and their prompts would not be counted."""
    assert RelayedPaths.of(("/*",)).classify(path) is PathClass.AMBIGUOUS


def test_listed_control_route_is_relayed_under_its_name_only():
    paths = RelayedPaths.of(("/*", "/v1/load_lora_adapter"))

    assert paths.classify("/v1/load_lora_adapter") is PathClass.RELAYED
    assert paths.classify("/v1/unload_lora_adapter") is PathClass.CONTROL
    assert paths.classify("/sleep") is PathClass.CONTROL
    assert paths.classify("/anything") is PathClass.RELAYED


@given(route=st.sampled_from(sorted(CONTROL_ROUTES)), data=st.data())
def test_no_encoding_hides_a_control_route(route, data):
    spelled = "".join(
        f"%{ord(letter):02{data.draw(st.sampled_from('xX'))}}" if data.draw(st.booleans()) else letter
        for letter in route
    )

    assert PATHS.classify(f"/v1/{spelled}") is PathClass.CONTROL


@given(st.text(st.characters(max_codepoint=255)))
def test_any_path_is_classified_without_an_error(text):
    assert PATHS.classify(f"/v1/{text}") in PathClass
    assert PATHS.classify(quote(text, encoding="latin-1")) in PathClass
