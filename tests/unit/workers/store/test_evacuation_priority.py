"""Evacuation priority: tests of rules 2 to 4 of `workers.store.evacuation_priority`."""

from kvstore.block import HashAlgorithm, chain
from tests.support.builders import token_bytes
from workers.ports import RecentPrompt
from workers.store.evacuation_priority import RecentPrompts, by_evacuation_priority

BLOCK = 4
SALT = b"s" * 32


def tokens(*blocks: int) -> bytes:
    """Return the tokens of a prompt; each of its blocks consists of one repeated token."""
    return token_bytes([number for number in blocks for _ in range(BLOCK)])


def names(prompt: bytes, salt: bytes = b"") -> list[bytes]:
    return chain(prompt, BLOCK, salt=salt, algorithm=HashAlgorithm.SHA256_128)


def ordered(prompts, cached=()):
    return by_evacuation_priority(prompts, cached, block_tokens=BLOCK, algorithm=HashAlgorithm.SHA256_128)


def test_shared_then_recent_prefixes_come_first_in_chain_order():
    first, second, third = tokens(1, 2, 3), tokens(1, 4), tokens(9, 8)

    found = ordered([RecentPrompt(first, b""), RecentPrompt(third, b""), RecentPrompt(second, b"")])

    assert found == [names(first)[0], names(second)[1], *names(third), *names(first)[1:]]


def test_the_same_tokens_of_two_tenants_are_two_chains():
    prompt = tokens(1, 2)

    found = ordered([RecentPrompt(prompt, SALT), RecentPrompt(prompt, b""), RecentPrompt(prompt, SALT)])

    assert found == [*names(prompt, SALT), *names(prompt)]


def test_blocks_of_no_prompt_come_last_and_none_twice():
    prompt = tokens(1, 2)
    answers = [b"a" * 16, b"b" * 16]

    assert ordered([RecentPrompt(prompt, b"")], [names(prompt)[0], *answers]) == [*names(prompt), *answers]


def test_newest_prompts_are_kept_within_the_byte_limit():
    kept = RecentPrompts(most_bytes=3 * len(tokens(1)))
    for number in range(5):
        kept.note(tokens(number), b"")

    assert kept.all() == tuple(RecentPrompt(tokens(number), b"") for number in (2, 3, 4))

    kept.note(tokens(1, 2, 3, 4), b"")
    assert kept.all() == ()
