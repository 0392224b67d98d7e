import pytest

from kvstore.errors import LayoutMismatch
from kvstore.layouts.shards import BlockShape
from kvstore.namespace import ELEMENT_BYTES
from tests.support.kvstore.shapes import a_typed_namespace


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({}, "bf26518b225a6c782ace24cb0335187f"),
        ({"lora": "adapter@1", "layout": "HLND"}, "4deb26f15ddf483214a1484ae661a522"),
    ],
)
def test_digests_do_not_change_between_versions(fields, digest):
    """Compare digests with fixed ones, because a later version must find the blocks that this version has stored."""
    assert a_typed_namespace("float32", **fields).digest.hex() == digest


@pytest.mark.parametrize(("dtype", "size"), ELEMENT_BYTES.items())
def test_the_size_of_an_element_follows_from_the_block(dtype, size):
    assert a_typed_namespace(dtype).element_bytes == size


def test_unknown_dtype_size_follows_from_the_block_size():
    assert a_typed_namespace("mx6", block_bytes=3 * a_typed_namespace().elements).element_bytes == 3


@pytest.mark.parametrize("block_bytes", [1, 4 * 2 * 4 * 16 * 32 + 4, 2 * 2 * 4 * 16 * 32])
def test_inconsistent_block_size_is_refused_by_field(block_bytes):
    namespace = a_typed_namespace("float32", block_bytes=block_bytes)

    assert namespace.element_bytes is None
    with pytest.raises(LayoutMismatch) as refused:
        BlockShape.of(namespace)
    assert refused.value.field == "block_bytes"
