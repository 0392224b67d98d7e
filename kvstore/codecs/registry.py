"""Codec registry: makes the codecs of one tier by its settings, and remembers them by namespace.

The compression and encryption libraries are optional (extra `codecs`). They are imported only if the settings need
them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from kvstore.codecs.byte_planes import SplitCodec
from kvstore.codecs.plain import PlainCodec
from kvstore.codecs.quantised import Fp8Codec, Int8Codec
from kvstore.errors import InvalidArgument, NamespaceUnknown, StoreNotStarted
from kvstore.namespace import KvNamespace
from kvstore.native.float_formats import HalfFormat
from kvstore.ports import Codec

SECRET_DIGITS = 64
INSTALL = "install it with: pip install 'fleet-serving[codecs]'"


class Compression(StrEnum):
    NONE = "none"
    ZSTD = "zstd"  # lossless; shrinks blocks of bfloat16 values to 0.7 of their size
    LZ4 = "lz4"  # lossless; shrinks blocks of bfloat16 values to 0.9 of their size; decompresses faster than zstd
    FP8 = "fp8"  # halves the size; the error of a value is at most 1/16 of the value, except near zero
    # Shrinks blocks of 16 tokens to 0.56 of their size. The error of a value is at most 0.4 % of its channel's largest
    # value (`kvstore.codecs.quantised`).
    INT8 = "int8"


class CodecSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compression and encryption of blocks that leave a node's memory for a backing tier."""

    compression: Compression = Compression.NONE
    """Compression of blocks. The default is none: one core compresses at most about 3 GB/s, so compression is useful
    only for tiers that are slower than that."""

    sealing_secrets: tuple[str, ...] = ()
    """Secrets for encryption, newest first, each of at least 64 hexadecimal digits (``openssl rand -hex 32``). Empty:
    no encryption. To change the secret, add a new one at the front; the others still decrypt older blocks. Nodes that
    share a tier need the same secrets."""

    def __post_init__(self) -> None:
        for index, secret in enumerate(self.sealing_secrets):
            if len(secret) < SECRET_DIGITS or len(secret) % 2 or set(secret) - set("0123456789abcdefABCDEF"):
                raise ValueError(
                    f"sealing_secrets[{index}]: not an even number of at least {SECRET_DIGITS} hexadecimal digits; "
                    "make a secret with: openssl rand -hex 32"
                )
        if len({secret.lower() for secret in self.sealing_secrets}) != len(self.sealing_secrets):
            raise ValueError("sealing_secrets: a secret is listed twice")

    def __repr__(self) -> str:
        return f"CodecSettings(compression={self.compression.value!r}, sealing_secrets={len(self.sealing_secrets)})"


class Codecs:
    """Makes the codecs of one tier and keeps them by namespace. Thread-safe."""

    def __init__(self, settings: CodecSettings, limit: int = 256):
        """Import the libraries that the settings need.

        Args:
            settings: Compression and secrets for all namespaces.
            limit: Maximum number of namespaces to remember. If there are more, the least recently used one is
                forgotten.

        Raises:
            StoreNotStarted: A library is not installed.
        """
        self._compress = _compression(settings.compression)
        self._seal = _sealing(settings.sealing_secrets)
        self._limit = limit
        self._opened: OrderedDict[bytes, Codec] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, namespace: KvNamespace) -> Codec:
        """Return the codec of a namespace. The first call makes the codec.

        Raises:
            InvalidArgument: The compression does not support this dtype; the error names the field.
            LayoutMismatch: The layout is invalid, or the block size does not match the other fields.
        """
        digest = namespace.digest
        with self._lock:
            if (known := self._opened.get(digest)) is not None:
                self._opened.move_to_end(digest)
                return known
        codec = self._seal(digest, self._compress(namespace))
        with self._lock:
            self._opened[digest] = codec
            while len(self._opened) > self._limit:
                self._opened.popitem(last=False)
        return codec

    def of(self, digest: bytes) -> Codec:
        """Return the codec of a namespace for which `open` was called before.

        Raises:
            NamespaceUnknown: The namespace was not opened, or was forgotten.
        """
        with self._lock:
            codec = self._opened.get(digest)
            if codec is None:
                raise NamespaceUnknown(digest)
            self._opened.move_to_end(digest)
            return codec


def _compression(compression: Compression) -> Callable[[KvNamespace], Codec]:
    match compression:
        case Compression.NONE:
            return lambda _: PlainCodec()
        case Compression.ZSTD:
            try:
                from kvstore.codecs.zstd import Zstd  # noqa: PLC0415 - the library is optional
            except ImportError as error:
                raise StoreNotStarted(f"compression: zstd needs the package zstandard; {INSTALL}") from error
            return lambda namespace: SplitCodec(namespace, Zstd())
        case Compression.LZ4:
            try:
                from kvstore.codecs.lz4 import Lz4  # noqa: PLC0415 - the library is optional
            except ImportError as error:
                raise StoreNotStarted(f"compression: lz4 needs the package lz4; {INSTALL}") from error
            return lambda namespace: SplitCodec(namespace, Lz4())
        case Compression.FP8:
            return lambda namespace: Fp8Codec(_halves(namespace, compression))
        case Compression.INT8:
            return lambda namespace: Int8Codec(_halves(namespace, compression))


def _sealing(secrets: tuple[str, ...]) -> Callable[[bytes, Codec], Codec]:
    if not secrets:
        return lambda _, codec: codec
    try:
        from kvstore.codecs.sealing import SealedCodec, keys_for  # noqa: PLC0415 - the library is optional
    except ImportError as error:
        raise StoreNotStarted(f"sealing_secrets: encryption needs the package cryptography; {INSTALL}") from error
    keys = [bytes.fromhex(secret) for secret in secrets]
    return lambda digest, codec: SealedCodec(codec, keys_for(digest, keys))


def _halves(namespace: KvNamespace, compression: Compression) -> KvNamespace:
    """Return the namespace unchanged if its values can be quantised.

    Raises:
        InvalidArgument: The dtype is not a 16-bit floating-point type.
    """
    if namespace.dtype not in tuple(HalfFormat):
        raise InvalidArgument(
            "namespace.dtype",
            f"{compression} compression supports only {' and '.join(HalfFormat)}, not {namespace.dtype}; "
            "set compression to none, zstd or lz4 on this node",
        )
    return namespace
