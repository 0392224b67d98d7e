"""The codec registry: which codec a namespace gets, and which settings and namespaces are refused."""

import sys

import msgspec
import pytest

from kvstore.codecs.registry import Codecs, CodecSettings, Compression
from kvstore.errors import InvalidArgument, LayoutMismatch, NamespaceUnknown, StoreNotStarted
from tests.support.kvstore.shapes import a_typed_namespace

SECRETS = ("5e" * 32, "A7" * 40)


def a_registry(limit: int = 256, **settings) -> Codecs:
    return Codecs(msgspec.convert(settings, CodecSettings), limit)


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("secrets", [(), SECRETS])
def test_open_namespace_keeps_its_codec(compression, secrets):
    codecs, namespace = a_registry(compression=compression, sealing_secrets=secrets), a_typed_namespace()

    codec = codecs.open(namespace)

    assert codecs.of(namespace.digest) is codec
    assert codecs.open(namespace) is codec
    assert codec.codec_id == list(Compression).index(compression) + (128 if secrets else 0)


def test_unopened_namespace_is_unknown():
    with pytest.raises(NamespaceUnknown):
        a_registry().of(a_typed_namespace().digest)


def test_least_recently_used_namespace_is_forgotten():
    codecs = a_registry(limit=2)
    first, second, third = (a_typed_namespace(model=model) for model in "abc")
    codecs.open(first)
    codecs.open(second)
    codecs.of(first.digest)

    codecs.open(third)

    assert codecs.of(first.digest) is not codecs.of(third.digest)
    with pytest.raises(NamespaceUnknown):
        codecs.of(second.digest)


@pytest.mark.parametrize("compression", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3", "int8"])
def test_quantising_other_dtypes_is_refused_by_field(compression, dtype):
    codecs = a_registry(compression=compression)

    with pytest.raises(InvalidArgument, match=f"{compression} compression supports only .*, not {dtype}") as refused:
        codecs.open(a_typed_namespace(dtype))

    assert refused.value.field == "namespace.dtype"
    with pytest.raises(NamespaceUnknown):
        codecs.of(a_typed_namespace(dtype).digest)


@pytest.mark.parametrize("compression", ["fp8", "int8"])
@pytest.mark.parametrize(("field", "value"), [("layout", "NHD"), ("block_bytes", 100)])
def test_quantising_an_invalid_layout_is_refused_by_field(compression, field, value):
    with pytest.raises(LayoutMismatch) as refused:
        a_registry(compression=compression).open(a_typed_namespace(**{field: value}))

    assert refused.value.field == field


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_lossless_codecs_take_any_namespace(compression):
    a_registry(compression=compression).open(a_typed_namespace(layout="NHD", block_bytes=100))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compression", "gzip"),
        ("compression", ""),
        ("sealing_secrets", ["ab" * 31]),
        ("sealing_secrets", ["ab" * 32, "zz" * 32]),
        ("sealing_secrets", ["a" * 65]),
        ("sealing_secrets", [" " + "a" * 63]),
        ("sealing_secrets", ["ab" * 32, "AB" * 32]),
        ("surprise", 1),
    ],
)
def test_invalid_settings_are_refused_by_field(field, value):
    with pytest.raises(msgspec.ValidationError, match=field) as refused:
        msgspec.convert({field: value}, CodecSettings)

    assert "ab" * 31 not in str(refused.value)


def test_secrets_are_not_printed():
    settings = CodecSettings(sealing_secrets=SECRETS)

    assert not any(secret in repr(settings) for secret in SECRETS)


@pytest.mark.parametrize(
    ("module", "settings", "field"),
    [
        ("zstandard", {"compression": "zstd"}, "compression"),
        ("lz4.block", {"compression": "lz4"}, "compression"),
        ("cryptography.hazmat.primitives.ciphers.aead", {"sealing_secrets": SECRETS}, "sealing_secrets"),
    ],
)
def test_missing_library_is_named_with_its_setting(monkeypatch, module, settings, field):
    for ours in ("kvstore.codecs.zstd", "kvstore.codecs.lz4", "kvstore.codecs.sealing"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(StoreNotStarted, match=f"{field}.*pip install"):
        a_registry(**settings)


@pytest.mark.parametrize("module", ["zstandard", "lz4.block", "cryptography"])
def test_unused_libraries_are_not_imported(monkeypatch, module):
    for ours in ("kvstore.codecs.zstd", "kvstore.codecs.lz4", "kvstore.codecs.sealing"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    monkeypatch.setitem(sys.modules, module, None)

    assert a_registry().open(a_typed_namespace()).codec_id == 0
