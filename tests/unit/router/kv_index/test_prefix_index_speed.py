"""Speed of the prefix index: on a public trace, it gives the answers of a simple reference with a known share of its work.

Work is counted in bytecode steps of the interpreter, which are the same on every machine under any load. Processor time is less
precise, but also covers the work that C code does in one step.
"""

import sys
from functools import cache

from fleet.router.kv_index.prefix_index import PrefixIndex
from loadtests.router.index_figures import IndexOperation, MeasuredIndex, ReferenceIndex, operations, replay
from tests.support.sim.traces import CONVERSATION

WORKERS, CAPACITY = 16, 4_000
STEPS_OF_REFERENCE = 0.219
"""Steps of the prefix index divided by those of the reference, as last measured; a tenth more is a regression."""


@cache
def done() -> list[IndexOperation]:
    return operations(CONVERSATION, requests=200, workers=WORKERS, capacity=CAPACITY)


def steps(index: MeasuredIndex) -> int:
    """Return the number of interpreter steps that the operations (`done`) take on an index."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        counted += event == "opcode"
        return count

    for number in range(WORKERS):
        index.add(f"worker/{number}", CAPACITY)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for each in done()[:60]:
            index.longest(each.asked)
            index.removed(each.holder, each.removed)
            index.stored(each.holder, each.stored)
    finally:
        sys.settrace(before)
    return counted


def test_trace_has_shared_hits_and_removals():
    assert sum(bool(each.removed) for each in done()) > 50
    index = ReferenceIndex()
    for each in done():
        index.stored(each.holder, each.stored)
    assert sum(len(index.longest(each.asked)) > 1 for each in done()) > 50


def test_index_equals_the_reference_on_a_trace():
    index, reference = PrefixIndex(), ReferenceIndex()
    for number in range(WORKERS):
        index.add(f"worker/{number}", CAPACITY)
    for each in done():
        assert index.longest(each.asked) == reference.longest(each.asked)
        for either in (index, reference):
            either.removed(each.holder, each.removed)
            either.stored(each.holder, each.stored)
    index.check()
    assert index.overflowed == 0


def test_index_needs_no_more_bytecode_steps_than_recorded():
    share = steps(PrefixIndex()) / steps(ReferenceIndex())

    assert share < 1.1 * STEPS_OF_REFERENCE


def test_index_is_faster_than_the_reference():
    def ratio() -> float:
        ours, changes = replay(PrefixIndex(), done(), WORKERS, CAPACITY)
        plain, plain_changes = replay(ReferenceIndex(), done(), WORKERS, CAPACITY)
        return (sum(ours) + changes) / (sum(plain) + plain_changes)

    assert any(ratio() < 0.9 for _ in range(10)), "what shares the core takes from its caches, too"
