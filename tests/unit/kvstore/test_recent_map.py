from hypothesis import given
from hypothesis import strategies as st

from kvstore.recent_map import RecentMap

STEPS = st.lists(st.tuples(st.sampled_from(["note", "forget"]), st.integers(0, 7), st.integers()))


@given(most=st.integers(1, 5), steps=STEPS)
def test_map_keeps_the_newest_keys_within_its_limit(most, steps):
    recent, model = RecentMap(most), []
    for step, key, value in steps:
        model = [entry for entry in model if entry[0] != key]
        if step == "note":
            model = [*model, (key, value)][-most:]
            recent.note(key, value)
        else:
            recent.forget(key)

        assert [(key, recent.get(key)) for key in recent] == model
        assert len(recent) == len(model)
        assert [key in recent for key in range(8)] == [key in dict(model) for key in range(8)]


def test_look_up_makes_no_key_newer():
    recent = RecentMap(2)
    for key in "ab":
        recent.note(key, None)
    assert recent.get("a") is None
    assert "a" in recent

    recent.note("c", None)

    assert list(recent) == ["b", "c"]
