"""Sealing: a block opens only under its own key, namespace, codec and secret."""

import numpy as np
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.codecs.quantised import Fp8Codec
from kvstore.codecs.sealing import SealedCodec, keys_for
from kvstore.errors import UndecodableBlock
from kvstore.messages import BlockKey
from tests.support.kvstore.shapes import a_key, a_typed_namespace

GOLDEN = "0100ed79addb23de7fdb00000000000000000000000064c02573e5d2ee80f659e223e90b25d5af8ce7c6e4f0748223cdf35ab52a28f0"
OLD, NEW, OTHER = (bytes([seed]) * 32 for seed in (1, 2, 3))
NAMESPACE = a_typed_namespace()
BLOCK = np.random.default_rng(0).integers(0, 256, NAMESPACE.block_bytes, np.uint8)


def a_seal(*secrets: bytes, inner=None, digest=NAMESPACE.digest, nonces=None) -> SealedCodec:
    more = {} if nonces is None else {"nonces": nonces}
    return SealedCodec(inner or PlainCodec(), keys_for(digest, secrets or (OLD,)), **more)


def opened(codec, key, sealed) -> np.ndarray:
    into = np.zeros(NAMESPACE.block_bytes, np.uint8)
    codec.decode(key, sealed, into)
    return into


def test_sealed_block_opens_and_hides_its_bytes():
    key = a_key(NAMESPACE)
    sealed = a_seal().encode(key, BLOCK)

    assert np.array_equal(opened(a_seal(), key, sealed), BLOCK)
    assert BLOCK[:64].tobytes() not in sealed.tobytes()
    assert sealed.nbytes == BLOCK.nbytes + 38


def test_ciphertexts_swapped_between_two_blocks_do_not_open():
    codec = a_seal()
    one, two = a_key(NAMESPACE, "one"), a_key(NAMESPACE, "two")
    sealed = {key: codec.encode(key, BLOCK) for key in (one, two)}

    for key, others in ((one, sealed[two]), (two, sealed[one])):
        with pytest.raises(UndecodableBlock, match="broken"):
            opened(codec, key, others)


def test_ciphertexts_swapped_between_two_namespaces_do_not_open():
    other = a_typed_namespace(model="other")
    ours, theirs = a_key(NAMESPACE), a_key(other)
    sealed = a_seal().encode(ours, BLOCK)

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(a_seal(digest=other.digest), theirs, sealed)


def test_namespace_is_authenticated():
    """Open a payload under another namespace digest with the same block hash: this must fail."""
    codec = a_seal()
    key = a_key(NAMESPACE)
    sealed = codec.encode(key, BLOCK)

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(codec, BlockKey(b"x" * 16, key.name), sealed)


def test_another_secret_does_not_open_a_block():
    sealed = a_seal(OLD).encode(a_key(NAMESPACE), BLOCK)

    with pytest.raises(UndecodableBlock, match="which this node does not have"):
        opened(a_seal(OTHER), a_key(NAMESPACE), sealed)


def test_rotation_seals_with_new_and_opens_with_old_secret():
    key = a_key(NAMESPACE)
    before, rotated, after = a_seal(OLD), a_seal(NEW, OLD), a_seal(NEW)
    old, new = before.encode(key, BLOCK), rotated.encode(key, BLOCK)

    assert np.array_equal(opened(rotated, key, old), BLOCK)
    assert np.array_equal(opened(after, key, new), BLOCK)
    with pytest.raises(UndecodableBlock):
        opened(before, key, new)
    with pytest.raises(UndecodableBlock):
        opened(after, key, old)


def test_payload_with_another_secret_id_does_not_open():
    key = a_key(NAMESPACE)
    codec = a_seal(NEW, OLD)
    sealed = codec.encode(key, BLOCK).copy()
    sealed[2:10] = a_seal(OLD).encode(key, BLOCK)[2:10]

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(codec, key, sealed)


@pytest.mark.parametrize("position", [*range(40), -17, -16, -1])
def test_changed_byte_of_a_payload_is_detected(position):
    key = a_key(NAMESPACE)
    sealed = a_seal().encode(key, BLOCK).copy()
    sealed[position] ^= 0x10

    with pytest.raises(UndecodableBlock):
        opened(a_seal(), key, sealed)


def test_payload_of_another_codec_does_not_open():
    key = a_key(NAMESPACE)
    sealed = a_seal(inner=Fp8Codec(NAMESPACE)).encode(key, np.zeros_like(BLOCK)).copy()
    sealed[1] = 0  # the id of the plain codec

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(a_seal(), key, sealed)


def test_sealing_twice_gives_different_bytes():
    key = a_key(NAMESPACE)

    assert not np.array_equal(a_seal().encode(key, BLOCK), a_seal().encode(key, BLOCK))


def test_sealed_format_has_not_changed():
    """Compare sealed bytes with fixed ones, because other versions and other languages must be able to open them."""
    key = BlockKey(bytes(range(16)), bytes(range(16, 32)))
    codec = a_seal(bytes(range(32)), digest=key.digest, nonces=bytes)

    sealed = codec.encode(key, np.arange(16, dtype=np.uint8))

    assert sealed.tobytes().hex() == GOLDEN


def test_secrets_and_keys_are_not_printed():
    keys = keys_for(NAMESPACE.digest, [OLD, NEW])

    assert all(key.hex() not in repr(keys) and repr(key) not in repr(keys) for key in keys.by_id.values())


def test_sealed_codec_cannot_be_sealed_again():
    with pytest.raises(AssertionError, match="already"):
        a_seal(inner=a_seal())
