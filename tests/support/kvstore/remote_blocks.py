"""Blocks for tests of remote tiers (Redis and S3), which all store blocks in the same form."""

import numpy as np

from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.tiers import remote_records as records
from kvstore.tiers.remote import RemoteTier
from tests.support.kvstore.builders import a_block, a_chain, deadline_in, empty_buffers

DIGEST = b"namespace-digest"
KEYS = [BlockKey(DIGEST, name) for name in a_chain(4)]
BLOCKS = [a_block(seed) for seed in range(4)]


def read_outcomes(tier: RemoteTier, keys=KEYS, seconds: float = 20) -> list[BlockOutcome]:
    """Read blocks and return the outcomes; compare the bytes of each hit."""
    into = empty_buffers(len(keys))
    answers = tier.get(keys, into, deadline_in(seconds))
    for key, answer, block in zip(keys, answers, into, strict=True):
        assert answer.outcome is not BlockOutcome.MOVED or np.array_equal(block, BLOCKS[KEYS.index(key)])
    return [answer.outcome for answer in answers]


def a_stored_value(key: BlockKey = KEYS[1], block: np.ndarray = BLOCKS[1]) -> bytes:
    """Return the value that a remote tier stores for a block."""
    return records.pack(key, PlainCodec.codec_id, block.nbytes, block) + block.tobytes()
