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


def test_what_was_sealed_opens_and_is_not_to_be_read_before():
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


def test_the_key_is_authenticated_and_not_only_derived_from():
    """Were the keys of two blocks the same, the name and the namespace would still have to be right."""
    codec = a_seal()
    key = a_key(NAMESPACE)
    sealed = codec.encode(key, BLOCK)

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(codec, BlockKey(b"x" * 16, key.name), sealed)


def test_another_secret_does_not_open():
    sealed = a_seal(OLD).encode(a_key(NAMESPACE), BLOCK)

    with pytest.raises(UndecodableBlock, match="which this node does not have"):
        opened(a_seal(OTHER), a_key(NAMESPACE), sealed)


def test_after_a_rotation_the_new_secret_seals_and_the_old_one_still_opens():
    key = a_key(NAMESPACE)
    before, rotated, after = a_seal(OLD), a_seal(NEW, OLD), a_seal(NEW)
    old, new = before.encode(key, BLOCK), rotated.encode(key, BLOCK)

    assert np.array_equal(opened(rotated, key, old), BLOCK)
    assert np.array_equal(opened(after, key, new), BLOCK)
    with pytest.raises(UndecodableBlock):
        opened(before, key, new)
    with pytest.raises(UndecodableBlock):
        opened(after, key, old)


def test_a_payload_that_names_another_of_our_secrets_does_not_open():
    key = a_key(NAMESPACE)
    codec = a_seal(NEW, OLD)
    sealed = codec.encode(key, BLOCK).copy()
    sealed[2:10] = a_seal(OLD).encode(key, BLOCK)[2:10]

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(codec, key, sealed)


@pytest.mark.parametrize("position", [*range(40), -17, -16, -1])
def test_no_byte_of_a_payload_can_be_changed(position):
    key = a_key(NAMESPACE)
    sealed = a_seal().encode(key, BLOCK).copy()
    sealed[position] ^= 0x10

    with pytest.raises(UndecodableBlock):
        opened(a_seal(), key, sealed)


def test_what_another_codec_made_does_not_open():
    key = a_key(NAMESPACE)
    sealed = a_seal(inner=Fp8Codec(NAMESPACE)).encode(key, np.zeros_like(BLOCK)).copy()
    sealed[1] = 0  # says that it is plain

    with pytest.raises(UndecodableBlock, match="broken"):
        opened(a_seal(), key, sealed)


def test_a_block_that_is_sealed_twice_is_never_the_same():
    key = a_key(NAMESPACE)

    assert not np.array_equal(a_seal().encode(key, BLOCK), a_seal().encode(key, BLOCK))


def test_sealing_is_the_same_on_every_host():
    """Golden: another version, or another language, must open it."""
    key = BlockKey(bytes(range(16)), bytes(range(16, 32)))
    codec = a_seal(bytes(range(32)), digest=key.digest, nonces=bytes)

    sealed = codec.encode(key, np.arange(16, dtype=np.uint8))

    assert sealed.tobytes().hex() == GOLDEN


def test_secrets_and_keys_are_not_printed():
    keys = keys_for(NAMESPACE.digest, [OLD, NEW])

    assert all(key.hex() not in repr(keys) and repr(key) not in repr(keys) for key in keys.by_id.values())


def test_a_codec_that_is_sealed_is_not_sealed_again():
    with pytest.raises(AssertionError, match="already"):
        a_seal(inner=a_seal())
