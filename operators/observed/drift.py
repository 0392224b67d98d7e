"""Drift: detects which child objects other programs or persons have changed since the operator's last write. Pure.

Rules:

1. Kubernetes records who has written each field last, and calls this writer its owner (`metadata.managedFields`). A
   child has drifted if another writer owns a part of its specification or data, or if the operator no longer owns a
   field that it has applied.
2. A child that has drifted is applied again, once for each change of the owners of its fields. This apply restores the
   fields that the operator sets. Fields that others have added stay, because the operator has no value for them.
3. The owners that were seen last are only in the memory of this process. So a new leader cannot compare: it applies a
   child once if another writer owns a part of it. The removal of a field while no operator ran is not noticed; the field is
   restored at the next resync (`operators.settings.OperatorSettings.resync_seconds`).
"""

from fleet.net.kubernetes.views import FieldOwnership, NamedObject

MOST = 100_000
"""The maximum number of children that are remembered. A forgotten child counts as not seen before."""


class DriftDetector:
    """Detects drift: remembers who owned the fields of each child after the operator's last write, and compares."""

    def __init__(self) -> None:
        self._known: dict[str, FieldOwnership] = {}

    def drifted(self, child: NamedObject) -> bool:
        """Return whether another writer has changed the child since the operator's last write.

        A child that this process has not seen before counts as changed only if another writer owns a part of it.
        """
        now, uid = child.metadata.ownership, child.metadata.uid
        known = self._known.get(uid)
        if known is None:
            self._remember(uid, FieldOwnership(ours=now.ours))
            return bool(now.others)
        return (known.ours, known.others) != (now.ours, now.others)

    def applied(self, child: NamedObject) -> None:
        """Remember the owners of a child's fields, as the API server's answer to an apply names them.

        If other writers still own parts after the apply, these parts do not count as drift any more.
        """
        self._remember(child.metadata.uid, child.metadata.ownership)

    def scaled(self, child: NamedObject) -> None:
        """Remember the owners of a child's fields after the operator has changed its number of replicas.

        This write is not an apply, so the API server records another owner for the field `replicas`. That is not drift.
        """
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
