"""Handoff checksums: which checksums are sent, which ones are compared, and what happens if one differs."""

import json

import pytest
from msgspec import Struct

from fleet.core.work import PulledBlocks
from workers.engines.vllm.blocks.handoff_checksums import (
    CHECKSUMS,
    HandedChecksums,
    HandoffChecksums,
    PulledChecks,
    checksums_in,
    decoded,
    encoded,
)
from workers.engines.vllm.blocks.pull_counts import PullCounter, PullReader, pull_file

BLOCK = 4
TO_HAND_OFF = {"do_remote_decode": True}


class Request(Struct):
    """The part of vLLM's request that the checksums need."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: dict | None = None


def a_handoff() -> dict:
    """Build the parameters that vLLM's connector returns for a finished prefill."""
    return {"do_remote_prefill": True, "remote_block_ids": ([7, 8, 9],)}


def a_sender(ranks: int = 1, **fields) -> tuple[HandedChecksums, Request]:
    """Return the checksums of a prefill engine, with one request of ten tokens that has blocks 7, 8 and 9."""
    sender = HandedChecksums(block_tokens=BLOCK, ranks=ranks)
    request = Request("r", list(range(10)), **{"kv_transfer_params": TO_HAND_OFF, **fields})
    sender.arrived(request)
    return sender, request


def blocks_of(request_id: str) -> list[int]:
    return [7, 8, 9, 10]  # one more than the prompt needs, as vLLM may allocate


def sent(params: dict) -> HandoffChecksums | None:
    """Return the checksums that the decode engine reads from a handoff, which is sent as JSON."""
    return checksums_in(json.loads(json.dumps(params)))


@pytest.mark.parametrize("checksums", [[], [0], [1, 0xFFFFFFFF, 0x00ABCDEF]])
def test_encoded_checksums_are_decoded_to_the_same(checksums):
    assert decoded(encoded(checksums)) == checksums


@pytest.mark.parametrize("text", ["0", "0011", "x" * 8, "00" * 5])
def test_malformed_checksums_are_decoded_to_none(text):
    assert decoded(text) == []


def test_blocks_are_ordered_in_the_step_that_ends_the_prompt():
    sender, request = a_sender()

    assert sender.planned({"r": 6}, blocks_of) == {}
    request.num_computed_tokens = 6
    assert sender.planned({"other": 4}, blocks_of) == {}
    assert sender.planned({"r": 4}, blocks_of) == {"r": [7, 8, 9]}


def test_requests_without_handoff_are_not_ordered():
    sender, _ = a_sender(kv_transfer_params=None)

    assert sender.planned({"r": 10}, blocks_of) == {}


def test_checksums_of_all_ranks_are_added_to_the_handoff():
    sender, _ = a_sender(ranks=2)
    params = a_handoff()
    sender.finished("r", params)
    sender.computed({"r": {1: encoded([4, 5, 6]), 0: encoded([1, 2, 3])}, "aborted": {0: "", 1: ""}})

    found = sent(params)

    assert found is not None
    assert [found.of_rank(rank, ranks=2, block_tokens=BLOCK) for rank in (0, 1)] == [[1, 2, 3], [4, 5, 6]]


def test_missing_rank_leaves_the_handoff_without_checksums():
    sender, _ = a_sender(ranks=2)
    params = a_handoff()
    sender.finished("r", params)
    sender.computed({"r": {0: encoded([1, 2, 3])}})
    sender.computed({"r": {0: encoded([1, 2, 3]), 1: encoded([1, 2, 3])}})  # from a later step, so this is too late

    assert sent(params) == HandoffChecksums("crc32c", BLOCK, [])


def test_finished_request_is_not_ordered_any_more():
    sender, _ = a_sender()
    sender.finished("r", None)  # cancelled, so it hands nothing over

    assert sender.planned({"r": 10}, blocks_of) == {}


@pytest.mark.parametrize(
    "value",
    [None, [], {}, "crc32c", {"algorithm": "crc32c", "block_tokens": "4", "ranks": []}],
    ids=["missing", "list", "empty", "text", "wrong type"],
)
def test_malformed_handoff_has_no_checksums(value):
    assert checksums_in({CHECKSUMS: value}) is None


@pytest.mark.parametrize(
    "change",
    [{"algorithm": "crc64"}, {"block_tokens": 8}, {"ranks": ["00000001", "00000002"]}, {"ranks": []}],
    ids=["algorithm", "block size", "more ranks", "no rank"],
)
def test_checksums_that_do_not_fit_are_not_compared(change):
    handoff = HandoffChecksums(**{"algorithm": "crc32c", "block_tokens": BLOCK, "ranks": ["00000001"], **change})

    assert handoff.of_rank(0, ranks=1, block_tokens=BLOCK) == []


class Memory:
    """Fake memory of a decode engine: blocks by number; the checksum of a block is its content."""

    def __init__(self, *, checks: bool = True, **contents: int):
        self.contents = {int(name.removeprefix("b")): content for name, content in contents.items()}
        self.checks = PulledChecks((lambda ids: [self.contents[each] for each in ids]) if checks else None)

    def pulls(self, block_ids, checksums, *, first=0, failed=()):
        self.checks.began("r", block_ids, first=first, checksums=checksums)
        self.checks.ended({"r"}, failed=failed)
        return self.checks.take_corrupt(), self.checks.take_counts()


def test_right_blocks_are_verified():
    memory = Memory(b3=30, b4=40)

    assert memory.pulls([3, 4], [30, 40]) == (set(), PulledBlocks(verified=2))
    assert memory.checks.take_counts() == PulledBlocks(), "each pull is counted once"


def test_wrong_block_is_reported_and_counted():
    memory = Memory(b3=30, b4=41, b5=50)

    assert memory.pulls([3, 4, 5], [30, 40, 50]) == ({4}, PulledBlocks(verified=2, corrupt=1))
    assert memory.checks.take_corrupt() == set(), "each block is reported once"


def test_blocks_at_wrong_positions_are_corrupt():
    memory = Memory(b3=40, b4=30)

    assert memory.pulls([3, 4], [30, 40]) == ({3, 4}, PulledBlocks(corrupt=2))


def test_only_pulled_blocks_are_compared():
    memory = Memory(b4=40)

    assert memory.pulls([4], [30, 40], first=1) == (set(), PulledBlocks(verified=1))


def test_blocks_without_checksums_count_as_unverified():
    memory = Memory(b3=30, b4=40)

    assert memory.pulls([3, 4], []) == (set(), PulledBlocks(unverified=2))
    assert memory.pulls([3, 4], [30]) == (set(), PulledBlocks(verified=1, unverified=1))


def test_memory_that_cannot_be_read_leaves_blocks_unverified():
    assert Memory(checks=False).pulls([3], [30]) == (set(), PulledBlocks(unverified=1))


def test_failed_pull_is_not_compared():
    memory = Memory(b3=31)

    assert memory.pulls([3], [30], failed={"r"}) == (set(), PulledBlocks())
    memory.checks.ended({"r"}, failed=())
    assert memory.checks.take_counts() == PulledBlocks(), "a pull ends once"


def test_pull_counts_are_read_in_another_process(tmp_path):
    counter = PullCounter(pull_file(tmp_path, 1))
    reader = PullReader(pull_file(tmp_path, 1))
    assert reader.counts() == PulledBlocks()

    counter.add(PulledBlocks(verified=5, unverified=2))
    counter.add(PulledBlocks(verified=1, corrupt=1))

    assert reader.counts() == PulledBlocks(verified=6, corrupt=1, unverified=2)


def test_engine_without_checks_has_no_pull_counts(tmp_path):
    with pytest.raises(FileNotFoundError):
        PullReader(pull_file(tmp_path, 0))
