import pytest

from kvstore.messages import BlockChanges
from kvstore.service.watchers import NAMES_A_MESSAGE, Watchers, WatcherTooSlow
from tests.support.kvstore.builders import a_chain

DIGEST = b"d" * 16


def stored(*names: bytes) -> BlockChanges:
    return BlockChanges(digest=DIGEST, stored=names)


async def test_a_watcher_gets_the_dump_and_then_every_change():
    watchers = Watchers(queue_messages=4)
    stream = watchers.watch([stored(b"a")])

    assert await anext(stream) == stored(b"a")
    watchers.tell([stored(b"b")])
    watchers.tell([stored(b"c")])

    assert [await anext(stream), await anext(stream)] == [stored(b"b"), stored(b"c")]


async def test_changes_during_the_dump_follow_it():
    watchers = Watchers(queue_messages=4)
    stream = watchers.watch([stored(b"a"), stored(b"b")])
    assert await anext(stream) == stored(b"a")

    watchers.tell([stored(b"c")])

    assert [await anext(stream), await anext(stream)] == [stored(b"b"), stored(b"c")]


async def test_a_slow_watcher_is_cut_and_the_others_are_not():
    watchers = Watchers(queue_messages=2)
    slow, quick = watchers.watch([stored()]), watchers.watch([stored()])
    assert await anext(slow) == await anext(quick) == stored()

    for name in (b"a", b"b", b"c"):
        watchers.tell([stored(name)])
        assert await anext(quick) == stored(name)

    with pytest.raises(WatcherTooSlow):
        await anext(slow)
    watchers.tell([stored(b"d")])
    assert await anext(quick) == stored(b"d")


async def test_a_closed_stream_is_forgotten():
    watchers = Watchers(queue_messages=1)
    stream = watchers.watch([stored()])
    await anext(stream)

    await stream.aclose()

    assert not watchers.streams


async def test_large_changes_are_divided():
    watchers = Watchers(queue_messages=8)
    many = tuple(a_chain(NAMES_A_MESSAGE + 1))
    stream = watchers.watch([BlockChanges(digest=DIGEST, stored=many, tier="ssd")])

    parts = [await anext(stream), await anext(stream)]

    assert parts[0].stored + parts[1].stored == many
    assert {part.tier for part in parts} == {"ssd"}
