"""Settings that all backing tiers share."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.codecs.registry import CodecSettings


class KeepPolicy(StrEnum):
    """Rule that says which blocks of the pool are copied to a tier."""

    ALL = "all"  # every block, as soon as it is in the pool and as far as the write budget allows
    REUSED = "reused"  # blocks that were used again (`kvstore.hierarchy.admission`)
    NONE = "none"  # no block: the tier is only read


class TierSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Settings of one tier; `kind` names the tier. The node asks its tiers in the order of the settings."""

    keep: KeepPolicy = KeepPolicy.REUSED
    """Which blocks are copied to the tier. With ``reused``, the blocks of a prompt that comes only once are not
    written. With ``all``, these blocks are written too, so they are found after a restart or by other nodes that share
    the tier. With ``none``, the tier is only read."""

    daily_write_bytes: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of bytes that are written to the tier in a day, for disks that wear out. Further blocks are not
    written. 0: no limit."""

    codec: CodecSettings = CodecSettings()
    """Compression and encryption of the blocks in the tier."""
