"""Backing tiers that the contract suite tests. Add an entry to `CASES` for a new tier."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey
from kvstore.ports import BackingTier, Codec
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.redis.backend import open_redis
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.s3.backend import open_s3
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.tier import SsdTier
from tests.support.servers.processes import s3_credentials, shared_redis, shared_s3

MIB = 1 << 20

Codecs = Callable[[bytes], Codec]


@dataclass
class BackingTierCase:
    """One kind of tier, with room for at least 64 blocks of `builders.BLOCK_BYTES`."""

    open: Callable[[Codecs], BackingTier]  # opens a tier, first empty; after `close`, again with its content
    damage: Callable[[BackingTier, BlockKey], None] | None = None  # flips a bit of a stored block
    name: str = ""  # name of the kind of tier


def clock() -> MonotonicClock:
    return MonotonicClock()


def plain(digest: bytes) -> Codec:
    return PlainCodec()


@contextlib.contextmanager
def ssd(folder: Path) -> Iterator[BackingTierCase]:
    settings = SsdSettings(directories=(str(folder / "ssd"),), capacity_bytes=16 * MIB, segment_bytes=2 * MIB)
    yield BackingTierCase(
        open=lambda codecs: SsdTier.open(settings, codecs=codecs, clock=clock()),
        damage=lambda tier, key: flip_on_disk(folder / "ssd", key),
        name="ssd",
    )


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[BackingTierCase]:
    server = shared_redis()
    settings = RedisSettings(url=server.url, key_prefix=f"test-{uuid.uuid4().hex}")

    def damage(tier: BackingTier, key: BlockKey) -> None:
        with server.client() as client:
            name = f"{settings.key_prefix}:{key.digest.hex()}:{key.name.hex()}"
            client.setrange(name, 64 + 17, bytes([client.getrange(name, 64 + 17, 64 + 17)[0] ^ 1]))

    yield BackingTierCase(
        open=lambda codecs: open_redis(settings, codecs=codecs, clock=clock()),
        damage=damage,
        name="redis",
    )
    with server.client() as client:
        if kept := list(client.scan_iter(f"{settings.key_prefix}:*", count=1000)):
            client.delete(*kept)


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[BackingTierCase]:
    server = shared_s3()
    settings = S3Settings(
        bucket=f"test-{uuid.uuid4().hex}", endpoint_url=server.url, region="us-east-1", missing_seconds=0
    )
    client = server.client
    client.create_bucket(Bucket=settings.bucket)

    def damage(tier: BackingTier, key: BlockKey) -> None:
        name = f"{settings.prefix}/{key.digest.hex()}/{key.name.hex()}"
        content = bytearray(client.get_object(Bucket=settings.bucket, Key=name)["Body"].read())
        content[64 + 17] ^= 1
        client.put_object(Bucket=settings.bucket, Key=name, Body=content)

    with s3_credentials():
        yield BackingTierCase(
            open=lambda codecs: open_s3(settings, codecs=codecs, clock=clock()),
            damage=damage,
            name="s3",
        )


def flip_on_disk(folder: Path, key: BlockKey) -> None:
    """Flip a bit in the payload of a block, in the SSD tier's segment that contains it."""
    for path in sorted(folder.glob("segment-*")):
        content = path.read_bytes()
        at = content.find(key.digest + key.name)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek((at // 4096 + 1) * 4096 + 17)
                file.write(bytes([content[(at // 4096 + 1) * 4096 + 17] ^ 1]))
            return
    raise AssertionError(f"{key} is in no segment of {folder}")


CASES: dict[str, Callable[[Path], contextlib.AbstractContextManager[BackingTierCase]]] = {
    "ssd": ssd,
    "redis": redis,
    "s3": s3,
}
