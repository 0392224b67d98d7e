"""Worker revisions: remembers the revision of each deployment's workers until its specification changes.

Most reconciles follow a change of pods, and making all pod templates is a large part of their time.
"""

from collections.abc import Callable

from operators.keys import ReconcileKey
from operators.manifests.names import DesiredDeployment


class WorkerRevisions:
    """Revisions of all deployments.

    Args:
        compute: Returns the revision of a deployment's workers (`operators.manifests.workloads.revision`).
    """

    def __init__(self, compute: Callable[[DesiredDeployment], str]) -> None:
        self._compute = compute
        self._known: dict[ReconcileKey, tuple[DesiredDeployment, str]] = {}

    def of(self, key: ReconcileKey, desired: DesiredDeployment) -> str:
        """Return the revision of a deployment's workers. It is computed if `desired` differs from that of the last call."""
        known, found = self._known.get(key, (None, ""))
        if known != desired:
            found = self._compute(desired)
            self._known[key] = (desired, found)
        return found

    def forget(self, key: ReconcileKey) -> None:
        """Forget a deployment that was deleted."""
        self._known.pop(key, None)
