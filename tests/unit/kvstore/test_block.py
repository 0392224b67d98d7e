"""Block hashes: equal in all processes and languages, and different for different salts."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import HashAlgorithm, adapter_salt, chain, extend, root, tenant_salt

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "chain_vectors.json").read_text())

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=64)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1)
salts = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32))

IN_ANOTHER_PROCESS = """
import json, struct, sys
from kvstore.block import HashAlgorithm, chain
for vector in json.load(sys.stdin):
    names = chain(
        struct.pack(f"<{len(vector['tokens'])}I", *vector["tokens"]), vector["block_tokens"],
        salt=bytes.fromhex(vector["salt"]), algorithm=HashAlgorithm(vector["algorithm"]),
        extras={int(block): bytes.fromhex(extra) for block, extra in vector["extras"].items()},
    )
    print(json.dumps([name.hex() for name in names]))
"""


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def test_the_vectors_cover_both_algorithms_and_every_rule():
    for algorithm in HashAlgorithm:
        mine = [vector for vector in VECTORS if vector["algorithm"] == algorithm]
        assert len(mine) >= 12
        assert len({vector["block_tokens"] for vector in mine}) >= 4
        assert any(vector["salt"] for vector in mine)
        assert any(len(vector["extras"]) > 1 for vector in mine)
        assert any(not vector["tokens"] for vector in mine)
        assert any(vector["names"] and len(vector["tokens"]) % vector["block_tokens"] for vector in mine)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['algorithm']}: {vector['description']}")
def test_hashes_match_the_test_vectors(vector):
    names = chain(
        packed(vector["tokens"]),
        vector["block_tokens"],
        salt=bytes.fromhex(vector["salt"]),
        algorithm=HashAlgorithm(vector["algorithm"]),
        extras={int(block): bytes.fromhex(extra) for block, extra in vector["extras"].items()},
    )

    assert [name.hex() for name in names] == vector["names"]


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_hashes_are_equal_in_another_process(hash_seed):
    answer = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=json.dumps(VECTORS),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(HERE.parents[2])},
        timeout=30,
    )

    assert [json.loads(line) for line in answer.stdout.splitlines()] == [vector["names"] for vector in VECTORS]


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc) on this machine")
def test_hashes_are_equal_in_c(tmp_path):
    program = tmp_path / "chain"
    subprocess.run(
        ["cc", "-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, HERE / "chain.c"], check=True
    )
    mine = [vector for vector in VECTORS if vector["algorithm"] == HashAlgorithm.SHA256_128]

    answer = subprocess.run(
        [program], input="".join(map(c_request, mine)), capture_output=True, text=True, check=True, timeout=30
    )

    assert [line.split() for line in answer.stdout.splitlines()] == [vector["names"] for vector in mine]


def c_request(vector: dict) -> str:
    extras = ",".join(f"{block}:{extra}" for block, extra in vector["extras"].items())
    ids = ",".join(map(str, vector["tokens"]))
    return f"{vector['block_tokens']} {vector['salt'] or '-'} {ids or '-'} {extras or '-'}\n"


@given(tokens, salts, salts, st.sampled_from(HashAlgorithm))
def test_two_salts_never_share_a_block(ids, one, other, algorithm):
    mine = set(chain(packed(ids), 4, salt=one, algorithm=algorithm))
    theirs = set(chain(packed(ids), 4, salt=other, algorithm=algorithm))

    assert mine == theirs if one == other else mine.isdisjoint(theirs)


@given(st.text(min_size=1), st.text(min_size=1), st.binary(min_size=1), st.binary(min_size=1))
def test_tenants_share_a_salt_only_with_themselves(tenant, other, secret, other_secret):
    mine = tenant_salt(secret, tenant)

    assert len(mine) == 32
    assert (tenant_salt(secret, other) == mine) == (other == tenant)
    assert tenant_salt(secret, "") == b""
    if other_secret.rstrip(b"\0") != secret.rstrip(b"\0"):  # HMAC pads keys with zeros, so these keys are equal
        assert tenant_salt(other_secret, tenant) != mine


def test_adapter_salts_match_the_test_vectors():
    """Compare the salts of LoRA adapters with fixed values; they are plain SHA-256, so any language can compute them."""
    assert adapter_salt("ada@1").hex() == "6ed43e4547fe7dc5efd9408744a83bff179d0c3f1dd74a1fbe6105c2b125ff80"
    assert (
        adapter_salt("ada@1", bytes(range(32))).hex()
        == "ee2a727e9bab9b43385882d33e134824f8c432eea33f146682faeef99fa228ee"
    )


@given(tokens, st.integers(0, 15), st.binary(min_size=36, max_size=36), st.binary(min_size=36, max_size=36))
def test_blocks_with_distinct_images_differ(ids, where, one, other):
    """Compare chains with and without an image at a block; `one` and `other` are its offset and the digest of its content."""
    mine = chain(packed(ids), 4, extras={where: one})
    theirs = chain(packed(ids), 4, extras={where: other})
    without = chain(packed(ids), 4)

    assert mine[:where] == theirs[:where] == without[:where]
    assert set(mine[where:]).isdisjoint(without)
    assert mine[where:] == theirs[where:] if one == other else set(mine[where:]).isdisjoint(theirs)


@given(NAMES, NAMES, salts, salts)
def test_adapters_share_a_salt_only_with_themselves(adapter, other, salt, other_salt):
    mine = adapter_salt(adapter, salt)

    assert len(mine) == 32
    if "\0" not in adapter + other:
        assert (adapter_salt(other, other_salt) == mine) == ((other, other_salt) == (adapter, salt))
    assert mine not in (salt, other_salt)


@given(tokens, st.integers(1, 8), st.integers(0, 8))
def test_a_chain_can_be_continued_where_it_ended(ids, block_tokens, blocks_before):
    whole = chain(packed(ids), block_tokens)
    blocks_before = min(blocks_before, len(whole))
    parent = whole[blocks_before - 1] if blocks_before else root()

    rest = extend(parent, packed(ids[blocks_before * block_tokens :]), block_tokens)

    assert whole[blocks_before:] == rest


@given(tokens, st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_hash_covers_every_token_before_it(ids, place, token):
    if place >= len(ids) or ids[place] == token:
        return
    changed = [*ids[:place], token, *ids[place + 1 :]]
    before, after = chain(packed(ids), 4), chain(packed(changed), 4)

    assert before[: place // 4] == after[: place // 4]
    assert all(one != other for one, other in zip(before[place // 4 :], after[place // 4 :], strict=True))
