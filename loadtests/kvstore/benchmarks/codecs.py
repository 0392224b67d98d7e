"""Benchmark of codecs: compression and speed on bfloat16 blocks that resemble KV, with one thread."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import numpy as np

from kvstore.clock import Nanos
from kvstore.codecs.registry import Codecs, CodecSettings, Compression
from kvstore.errors import StoreNotStarted
from kvstore.namespace import KvNamespace
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.benchmarks.codec_figures import CodecFigures, measure
from loadtests.kvstore.benchmarks.memory import speed
from loadtests.kvstore.benchmarks.plan import BenchmarkPlan
from loadtests.kvstore.compared.systems import GIGABYTE, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, LineDirection

LAYERS, HEADS, TOKENS, ELEMENTS = 32, 8, 16, 256  # 16 tokens of an 8B model with 8 KV heads: 2 MiB
NAMESPACE = KvNamespace(
    model="bench-codecs",
    revision="r1",
    dtype="bfloat16",
    block_tokens=TOKENS,
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=ELEMENTS,
    block_bytes=2 * LAYERS * HEADS * TOKENS * ELEMENTS,
)
SECRET = "42" * 32


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:  # noqa: ARG001 - no compared system has a codec for hosts without GPUs
    """Yield three lines for each codec: size, encoding speed, decoding speed."""
    settings = {each.value: CodecSettings(compression=each) for each in Compression if each is not Compression.NONE}
    settings["sealed"] = CodecSettings(sealing_secrets=(SECRET,))
    found = []
    for name, each in settings.items():
        figures = _Figures(each)
        found.append(
            BenchmarkLine(
                name=f"codec {name}: size of a block / kept", unit="×", better=LineDirection.MORE, fleet=figures.ratio
            )
        )
        found += [
            BenchmarkLine(
                name=f"codec {name}: {kind}",
                unit="GB/s",
                better=LineDirection.MORE,
                limit=_memcpy,
                limit_is="memcpy",
                fleet=partial(figures.speed, kind),
            )
            for kind in ("encode", "decode")
        ]
    yield found


class _Figures:
    def __init__(self, settings: CodecSettings):
        self._settings = settings

    def ratio(self) -> float:
        return self._measured().ratio

    def speed(self, kind: str) -> float:
        return float(getattr(self._measured(), f"{kind}_bytes_per_second")) / GIGABYTE

    def _measured(self) -> CodecFigures:
        try:
            codec = Codecs(self._settings).open(NAMESPACE)
        except StoreNotStarted as error:
            raise SystemUnavailable(str(error)) from error
        return measure(codec, NAMESPACE, lambda: Nanos(time.perf_counter_ns()), rounds=3)


@cache
def _blocks() -> tuple[np.ndarray, np.ndarray]:
    return np.ones(NAMESPACE.block_bytes, dtype=np.uint8), np.ones(NAMESPACE.block_bytes, dtype=np.uint8)


def _memcpy() -> float:
    source, room = _blocks()
    return speed(NAMESPACE.block_bytes, lambda: np.copyto(room, source))
