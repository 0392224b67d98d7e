"""What the settings of all tiers below a node's memory have in common."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.codecs.registry import CodecSettings


class KeepPolicy(StrEnum):
    """Which blocks of the pool go down to a tier."""

    ALL = "all"  # each, as soon as it is written
    REUSED = "reused"  # those that were used again, or are likely to be
    NONE = "none"  # the tier is only read


class TierSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Of one tier; its `kind` says which. Tiers are asked in the order in which they stand in the settings."""

    keep: KeepPolicy = KeepPolicy.REUSED
    """Which blocks go down. A one-time scan writes nothing with ``reused``; ``all`` also serves what was seen only once,
    after a restart or, through a tier that nodes share, elsewhere."""

    daily_write_bytes: Annotated[int, Meta(ge=0)] = 0
    """The most that is written in a day, for disks that wear. 0: no limit."""

    codec: CodecSettings = CodecSettings()
    """How blocks are kept there."""
