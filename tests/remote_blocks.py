"""Four blocks that tests of tiers on other machines keep and fetch: Redis and S3 hold them alike."""

import numpy as np

from kvstore.clock import Nanos
from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.monotonic import MonotonicClock
from kvstore.tiers import records
from kvstore.tiers.remote import RemoteTier
from tests.kv_builders import BLOCK_BYTES, a_block, a_chain

DIGEST = b"namespace-digest"
KEYS = [BlockKey(DIGEST, name) for name in a_chain(4)]
BLOCKS = [a_block(seed) for seed in range(4)]


def within(seconds: float) -> Nanos:
    return Nanos(MonotonicClock().now() + round(seconds * 1e9))


def empty(count: int = 4) -> list[np.ndarray]:
    return [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(count)]


def outcomes(tier: RemoteTier, keys=KEYS, seconds: float = 20) -> list[BlockOutcome]:
    """What comes of a get; whatever is said to be there is compared."""
    into = empty(len(keys))
    answers = tier.get(keys, into, within(seconds))
    for key, answer, block in zip(keys, answers, into, strict=True):
        assert answer.outcome is not BlockOutcome.MOVED or np.array_equal(block, BLOCKS[KEYS.index(key)])
    return [answer.outcome for answer in answers]


def a_value(key: BlockKey = KEYS[1], block: np.ndarray = BLOCKS[1]) -> bytes:
    """As it lies there, under the place of its key."""
    return records.pack(key, PlainCodec.codec_id, block.nbytes, block) + block.tobytes()
