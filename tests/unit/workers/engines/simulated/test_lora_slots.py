"""LoRA slots: their number is limited, adapters in use keep theirs, and the adapter that was idle longest is replaced."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engines.simulated.lora_slots import LoraSlots

NAMES = st.sampled_from("abcd")


def test_loaded_adapter_is_not_loaded_again():
    slots = LoraSlots(2)

    assert slots.hold("a")
    assert not slots.hold("a")
    slots.release("a")
    slots.release("a")
    assert not slots.hold("a")
    assert slots.loads == 1


def test_adapter_idle_longest_is_replaced():
    slots = LoraSlots(2)
    for name in "ab":
        slots.hold(name)
        slots.release(name)

    slots.hold("c")

    assert slots.loaded == ("c", "b")


def test_request_waits_while_all_slots_are_held():
    slots = LoraSlots(1)
    slots.hold("a")

    assert not slots.takes("b")
    assert slots.takes("a")
    slots.release("a")
    assert slots.takes("b")


class SlotsKeepTheirBooks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = LoraSlots(2)
        self.held: list[str] = []

    @rule(name=NAMES)
    def hold(self, name: str) -> None:
        there = name in self.slots.loaded
        if self.slots.takes(name):
            assert self.slots.hold(name) is not there
            self.held.append(name)
        else:
            assert len(set(self.held)) == 2
            assert name not in self.held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(name)
        self.slots.release(name)

    @invariant()
    def sound(self) -> None:
        self.slots.check()
        assert set(self.held) <= set(self.slots.loaded)


TestSlotsKeepTheirBooks = SlotsKeepTheirBooks.TestCase
