"""Load of the router benchmark, and the prefix cache of its mock workers."""

import json
from itertools import islice

import pytest
from tokenizers import Tokenizer

from fleet.core.errors import ConfigurationRefused
from fleet.local.tiny_model import build_tiny_model
from loadtests.router.load.prompts import Conversations, NewPrompts, Vocabulary
from loadtests.router.mock_workers.workers import BLOCK_BYTES, PrefixCache
from loadtests.router.scenarios import SCENARIOS, PrefixSharing, RouterScenario, quick
from loadtests.router.systems.targets import targets


def blocks(*names: str) -> bytes:
    return b"".join(name.encode() * BLOCK_BYTES for name in names)


def fields_of(request: bytes) -> dict:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return json.loads(body)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("models"), tokenizer_only=True)


@pytest.fixture(scope="module")
def vocabulary(model_dir):
    return Vocabulary(model_dir)


def test_seen_prompt_hits_up_to_last_full_block():
    cache = PrefixCache(capacity=10)

    assert cache.admit(blocks("a", "b") + b"rest") == (0, 2)
    assert cache.admit(blocks("a", "b") + b"else") == (2, 2)


def test_only_common_prefix_counts_as_hit():
    cache = PrefixCache(capacity=10)
    cache.admit(blocks("a", "b", "c"))

    assert cache.admit(blocks("a", "x", "c")) == (1, 3)
    assert cache.admit(blocks("b", "c")) == (0, 2)


def test_full_cache_evicts_ends_of_oldest_prompts():
    cache = PrefixCache(capacity=3)
    cache.admit(blocks("a", "b"))
    cache.admit(blocks("c", "d"))

    assert len(cache) == 3
    assert cache.admit(blocks("a", "b")) == (1, 2)


def test_new_prompts_are_unique_and_have_their_length(model_dir, vocabulary):
    scenario = RouterScenario(name="s", prompt_tokens=128, concurrency=1)
    prompts = NewPrompts(scenario, vocabulary, seed=1)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    found = [fields_of(prompts.next())["prompt"] for _ in range(100)]

    assert len({prompt[:16] for prompt in found}) == 100
    assert len({prompt[:4] for prompt in found}) > 90
    assert all(abs(len(tokenizer.encode(prompt).ids) - 128) <= 8 for prompt in found)


def test_conversation_has_shared_prefix_and_grows(vocabulary):
    sharing = PrefixSharing(groups=2, opening_tokens=50, turn_tokens=10, turns=3)
    conversations = Conversations(sharing, vocabulary, seed=1)

    turns = [fields_of(request)["prompt"] for request in islice(conversations.of("a"), 6)]
    other = [fields_of(request)["prompt"] for request in islice(conversations.of("b"), 30)]

    assert turns[1].startswith(turns[0])
    assert turns[2].startswith(turns[1])
    assert not turns[3].startswith(turns[2])
    assert len({prompt[:100] for prompt in other}) == 2
    assert turns[0][:100] in {prompt[:100] for prompt in other}
    assert turns == [fields_of(request)["prompt"] for request in islice(conversations.of("a"), 6)]


def test_quick_round_limits_requests_and_seconds():
    for scenario in SCENARIOS.values():
        short = quick(scenario)

        assert short.requests <= 200
        assert short.seconds <= 5


def test_direct_target_is_always_first():
    assert [target.name for target in targets(["relay", "fleet", "relay"])] == ["direct", "relay", "fleet"]


def test_policy_is_part_of_target_name():
    target = targets(["smg:round_robin"])[-1]

    assert (target.name, target.policy, target.version) == ("smg:round_robin", "round_robin", "1.13.0")


def test_unknown_target_is_refused_with_known_ones():
    with pytest.raises(ConfigurationRefused, match="nginx is not one of direct, relay, fleet"):
        targets(["nginx"])
