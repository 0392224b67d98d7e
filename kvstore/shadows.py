"""One shadow evaluation a namespace, of what the pool's hit rate would be at other sizes and under other policies. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from kvstore.block import ChainHash
from kvstore.clock import Nanos
from kvstore.layout import Namespace
from kvstore.shadow import Estimate, Scenario, Shadow, sample_names

SCALES = (0.5, 1.0, 2.0, 4.0)  # of the pool, under its own policy
ALTERNATIVES = ("lru", "hazard")  # at its own size
MAX_SHADOWS = 8  # namespaces that are looked at; a node has one or two


class NamespaceEstimates(Struct, frozen=True, kw_only=True):
    """What would be, for one namespace."""

    fingerprint: str
    estimates: tuple[Estimate, ...]


class Shadows:
    """By namespace; each is taken to have the whole pool."""

    def __init__(self, capacity_bytes: int, policy: str):
        """Nothing is known yet.

        Args:
            capacity_bytes: Of the pool.
            policy: Of the pool, by name.
        """
        self._capacity_bytes = capacity_bytes
        self._scenarios = [Scenario(policy, scale) for scale in SCALES]
        self._scenarios += [Scenario(other) for other in ALTERNATIVES if other != policy]
        self._shadows: dict[bytes, Shadow[ChainHash]] = {}

    def open(self, namespace: Namespace) -> None:
        """Begin to look at a namespace, unless there are enough."""
        if namespace.digest not in self._shadows and len(self._shadows) < MAX_SHADOWS:
            blocks = max(1, self._capacity_bytes // namespace.block_bytes)
            self._shadows[namespace.digest] = Shadow(blocks, self._scenarios, sample_names)

    def looked_up(self, digest: bytes, chain: Sequence[ChainHash], now: Nanos) -> None:
        """A client asked for all of a chain."""
        if (shadow := self._shadows.get(digest)) is not None:
            shadow.looked_up(chain, now)

    def stored(self, digest: bytes, chain: Sequence[ChainHash], now: Nanos) -> None:
        """A client writes what is missing of a chain."""
        if (shadow := self._shadows.get(digest)) is not None:
            shadow.stored(chain, now)

    def estimates(self) -> tuple[NamespaceEstimates, ...]:
        return tuple(
            NamespaceEstimates(fingerprint=digest.hex(), estimates=tuple(shadow.estimates()))
            for digest, shadow in self._shadows.items()
        )
