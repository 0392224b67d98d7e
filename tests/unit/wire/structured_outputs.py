"""Structured outputs, for the tests of both protocols that carry them."""

from hypothesis import strategies as st

from fleet.core.requests import AnyObject, Choice, Grammar, JsonSchema, Pattern, StructuralTag, ToolCallForm

TEXT = st.text(max_size=8)

FORMS = st.one_of(
    st.builds(AnyObject),
    st.builds(JsonSchema, TEXT),
    st.builds(Pattern, TEXT),
    st.builds(Grammar, TEXT),
    st.builds(StructuralTag, TEXT),
    st.builds(Choice, st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(ToolCallForm),
)
