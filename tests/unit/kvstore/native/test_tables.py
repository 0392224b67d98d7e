"""Table of blocks: the native module and its Python version, compared with a dict."""

import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.native import tables, tables_twin

native = pytest.param(tables, marks=pytest.mark.skipif(not tables.BUILT, reason="the native module is not built"))
each = pytest.mark.parametrize("module", [native, tables_twin])

KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543211)
NO_KEY = (0, 0)  # with this key, all hashes that begin with eight zeros collide


class Block:
    def __init__(self, number: int, length: int = 20):
        self.slot = number.to_bytes(length, "little")


def a_name(number: int) -> bytes:
    return bytes(8) + number.to_bytes(8, "big")


@each
def test_longest_prefix_is_found_with_its_slots(module):
    table = module.BlockTable(KEY)
    blocks = [Block(number) for number in range(100)]
    for number, block in enumerate(blocks):
        table.put(a_name(number), block)
    table.remove(a_name(60))
    names = b"".join(map(a_name, range(100)))

    assert table.blocks(names) == blocks[:60]
    assert table.slots(names) == b"".join(block.slot for block in blocks[:60])
    assert table.blocks(names[61 * 16 :]) == blocks[61:]
    assert table.blocks(names[60 * 16 :]) == []
    assert table.slots(b"") == b""
    assert table.blocks(names[:16] * 3) == [blocks[0]] * 3


@each
def test_put_replaces_the_block_of_the_same_hash(module):
    table = module.BlockTable(KEY)
    old, new = Block(1), Block(2)
    before = sys.getrefcount(old)
    table.put(a_name(1), old)
    table.put(a_name(1), new)

    assert sys.getrefcount(old) == before, "the table must release the block"
    assert len(table) == 1
    assert table.get(a_name(1)) is new
    assert table.slots(a_name(1)) == new.slot


@each
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get", (b"x" * 15,)),
        ("remove", (b"x" * 17,)),
        ("put", (b"", Block(1))),
        ("put", (b"x" * 16, Block(1, 19))),
        ("slots", (b"x" * 17,)),
        ("blocks", (b"x" * 15,)),
    ],
)
def test_invalid_hash_or_slot_is_refused(module, call, arguments):
    table = module.BlockTable(KEY)

    with pytest.raises(ValueError, match="bytes"):
        getattr(table, call)(*arguments)
    assert len(table) == 0


@each
def test_missing_block_cannot_be_removed(module):
    with pytest.raises(KeyError):
        module.BlockTable(KEY).remove(a_name(1))


@pytest.mark.skipif(not tables.BUILT, reason="the native module is not built")
@pytest.mark.parametrize("arguments", [(), (1,), ((1,),), ((1, 2, 3),), (("a", 2),)])
def test_a_table_without_a_key_is_refused(arguments):
    with pytest.raises(TypeError):
        tables.BlockTable(*arguments)


@pytest.mark.skipif(not tables.BUILT, reason="the native module is not built")
@pytest.mark.parametrize("block", [object(), type("Odd", (), {"slot": "x" * 20})()])
def test_block_without_a_slot_is_refused(block):
    table = tables.BlockTable(KEY)

    with pytest.raises((AttributeError, TypeError)):
        table.put(a_name(1), block)
    assert len(table) == 0


@each
def test_table_releases_removed_blocks(module):
    table, block = module.BlockTable(KEY), Block(7)
    before = sys.getrefcount(block)
    for number in range(5000):
        table.put(a_name(number), block)
    for number in range(5000):
        if number % 100:
            table.remove(a_name(number))

    assert sorted(table.names()) == [a_name(number) for number in range(0, 5000, 100)]
    assert sys.getrefcount(block) == before + len(table)
    for number in range(0, 5000, 100):
        assert table.blocks(a_name(number)) == [block]
    del table
    assert sys.getrefcount(block) == before


@each
def test_forged_hashes_do_not_collide_without_the_key(module):
    table = module.BlockTable((random.getrandbits(64), random.getrandbits(64)))
    block = Block(1)
    for number in range(20_000):  # with a known key this would take minutes
        table.put(a_name(number), block)

    assert len(table.blocks(b"".join(map(a_name, range(20_000))))) == 20_000


class TableAgainstDict(RuleBasedStateMachine):
    """Random histories with few hashes, half of which collide, so that entries of the table move."""

    numbers = st.integers(0, 150)

    @initialize(key=st.sampled_from([KEY, NO_KEY]))
    def make(self, key):
        self.table = tables.BlockTable(key)
        self.model: dict[bytes, Block] = {}

    @rule(number=numbers, slot=st.integers(0, 255))
    def put(self, number, slot):
        block = Block(slot)
        self.table.put(a_name(number), block)
        self.model[a_name(number)] = block

    @rule(first=numbers, count=st.integers(1, 60))
    def put_many(self, first, count):
        for number in range(first, first + count):
            self.put(number, number % 256)

    @rule(number=numbers)
    def remove(self, number):
        if self.model.pop(a_name(number), None) is not None:
            self.table.remove(a_name(number))

    @rule(first=numbers, count=st.integers(1, 60))
    def remove_many(self, first, count):
        for number in range(first, first + count):
            self.remove(number)

    @rule(first=numbers, count=st.integers(0, 60))
    def look(self, first, count):
        names = [a_name(number) for number in range(first, first + count)]
        found = []
        for name in names:
            if name not in self.model:
                break
            found.append(self.model[name])
        assert self.table.blocks(b"".join(names)) == found
        assert self.table.slots(b"".join(names)) == b"".join(block.slot for block in found)

    @invariant()
    def they_agree(self):
        if hasattr(self, "table"):
            assert len(self.table) == len(self.model)
            assert sorted(self.table.names()) == sorted(self.model)
            for number in range(0, 211, 7):
                assert self.table.get(a_name(number)) is self.model.get(a_name(number))
                assert (a_name(number) in self.table) == (a_name(number) in self.model)


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
