"""Drift: detects which child objects others have changed since our last write. Pure.

Rules:

1. Everybody who writes a field owns it from then on (`metadata.managedFields`). A child has drifted if another manager owns a
   part of its specification or data, or if our own apply lost a field.
2. A child that has drifted is applied again, once for each change of its owners: the apply takes our fields back. Fields that
   others have added stay theirs, because we have no value for them.
3. What was seen is remembered in this process only. A new leader applies each child once that another manager owns a part
   of; a field that was removed while no operator ran is restored with the next resync.
"""

from fleet.net.kubernetes.views import FieldOwnership, NamedObject

MOST = 100_000
"""Children that are remembered; a forgotten one counts as unchanged."""


class DriftDetector:
    """Remembers the owners of each child's fields after our last write."""

    def __init__(self) -> None:
        self._known: dict[str, FieldOwnership] = {}

    def drifted(self, child: NamedObject) -> bool:
        """Return whether somebody has changed the child; one that is new here counts only if others own a part of it."""
        now, uid = child.metadata.ownership, child.metadata.uid
        known = self._known.get(uid)
        if known is None:
            self._remember(uid, FieldOwnership(ours=now.ours))
            return bool(now.others)
        return (known.ours, known.others) != (now.ours, now.others)

    def applied(self, child: NamedObject) -> None:
        """Note the answer to an apply: what others still own is theirs."""
        self._remember(child.metadata.uid, child.metadata.ownership)

    def scaled(self, child: NamedObject) -> None:
        """Note the answer to a change of replicas, which takes that field from our apply."""
        known = self._known.get(child.metadata.uid, FieldOwnership())
        ours = child.metadata.ownership.ours
        self._remember(child.metadata.uid, FieldOwnership(ours=ours, others=known.others, managers=known.managers))

    def check(self) -> None:
        assert len(self._known) <= MOST

    def _remember(self, uid: str, owners: FieldOwnership) -> None:
        self._known.pop(uid, None)
        self._known[uid] = owners
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]
