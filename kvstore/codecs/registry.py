"""Which codec a namespace's blocks go through on their way to a backing tier: one choice for a node, one codec a namespace.

The libraries are optional (extra `codecs`), and imported here only when the settings ask for them.
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
    ZSTD = "zstd"  # exact; 0.7 of the size of bfloat16
    LZ4 = "lz4"  # exact; 0.9, and quick to read
    FP8 = "fp8"  # half; every value off by up to 1/16 of itself
    INT8 = "int8"  # 0.56; off by up to 0.4 % of the largest value of its channel


class CodecSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How blocks are kept outside a node's memory."""

    compression: Compression = Compression.NONE
    """None by default: below some 3 GB/s a core, compression pays only where the tier is slower than that."""

    sealing_secrets: tuple[str, ...] = ()
    """Secrets to encrypt with, newest first, at least 64 hexadecimal digits each (``openssl rand -hex 32``). Empty: no
    encryption. To rotate, put a new one in front. Nodes that share a tier need the same ones."""

    def __post_init__(self) -> None:
        for index, secret in enumerate(self.sealing_secrets):
            if len(secret) < SECRET_DIGITS or len(secret) % 2 or set(secret) - set("0123456789abcdefABCDEF"):
                raise ValueError(
                    f"sealing_secrets[{index}]: not an even number of at least {SECRET_DIGITS} hexadecimal digits; "
                    "make one with: openssl rand -hex 32"
                )
        if len({secret.lower() for secret in self.sealing_secrets}) != len(self.sealing_secrets):
            raise ValueError("sealing_secrets: the same secret twice")

    def __repr__(self) -> str:
        return f"CodecSettings(compression={self.compression.value!r}, sealing_secrets={len(self.sealing_secrets)})"


class Codecs:
    """The codecs of one node by namespace. Thread-safe."""

    def __init__(self, settings: CodecSettings, limit: int = 256):
        """Load what the settings ask for.

        Args:
            settings: For all namespaces.
            limit: Namespaces that are remembered; beyond it, the one that nobody asked for the longest is forgotten.

        Raises:
            StoreNotStarted: A library is not installed.
        """
        self._compress = _compression(settings.compression)
        self._seal = _sealing(settings.sealing_secrets)
        self._limit = limit
        self._opened: OrderedDict[bytes, Codec] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, namespace: KvNamespace) -> Codec:
        """Make a namespace known; again is fine.

        Raises:
            InvalidArgument: The compression is not for values of this kind. Names the field.
            LayoutMismatch: The layout is none, or the block size does not follow from the other fields.
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
        """The codec of a namespace.

        Raises:
            NamespaceUnknown: It was not opened, or has been forgotten.
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
                from kvstore.codecs.zstd import Zstd  # noqa: PLC0415 - optional
            except ImportError as error:
                raise StoreNotStarted(f"compression: zstd needs the package zstandard; {INSTALL}") from error
            return lambda namespace: SplitCodec(namespace, Zstd())
        case Compression.LZ4:
            try:
                from kvstore.codecs.lz4 import Lz4  # noqa: PLC0415 - optional
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
        from kvstore.codecs.sealing import SealedCodec, keys_for  # noqa: PLC0415 - optional
    except ImportError as error:
        raise StoreNotStarted(f"sealing_secrets: encryption needs the package cryptography; {INSTALL}") from error
    keys = [bytes.fromhex(secret) for secret in secrets]
    return lambda digest, codec: SealedCodec(codec, keys_for(digest, keys))


def _halves(namespace: KvNamespace, compression: Compression) -> KvNamespace:
    """The namespace, if its values can be scaled."""
    if namespace.dtype not in tuple(HalfFormat):
        raise InvalidArgument(
            "namespace.dtype",
            f"{namespace.dtype} cannot be kept as {compression}, which is for {' and '.join(HalfFormat)}; "
            "set compression to none, zstd or lz4 on this node",
        )
    return namespace
