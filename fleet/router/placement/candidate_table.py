"""All workers of a model as they stand for one request: who takes it, what each has to do, and what each has of its prompt."""

from collections.abc import Sequence

from msgspec import Struct

from fleet.router.candidates import Candidates, Flags, Floats, Rows
from fleet.router.placement.topology import PoolTopology


class ServingWorkers(Struct, frozen=True):
    """Who takes requests, until the next one drains."""

    draining: Flags
    able: Flags  # not draining
    answering: Flags  # of those, who decode
    rows: Rows  # of these

    @classmethod
    def of(cls, members: PoolTopology, draining: Flags) -> "ServingWorkers":
        answering = ~draining & members.decodes
        return cls(draining, ~draining, answering, answering.nonzero()[0])


class CandidateTable(Struct, frozen=True, eq=False):
    """All workers of a model as they stand for one request. Nothing in it changes any more, so that it can be explained."""

    members: PoolTopology
    columns: Floats  # see `fleet.router.candidates`
    serving: ServingWorkers
    failed: Flags | None = None  # on this request, in this incarnation; None: nobody
    warm: bool = True  # somebody may hold something of the prompt
    homes: Sequence[Flags] = ()  # of the request's adapter, the best first: see `fleet.router.state.lora`

    def __len__(self) -> int:
        return len(self.members)

    @property
    def draining(self) -> Flags:
        return self.serving.draining

    @property
    def able(self) -> Flags:
        """Who takes work: neither draining nor failed."""
        return self.serving.able if self.failed is None else self.serving.able & ~self.failed

    @property
    def answering(self) -> Flags:
        """Of those, who decode."""
        return self.serving.answering if self.failed is None else self.serving.answering & ~self.failed

    def candidates(self, rows: Rows) -> Candidates:
        """Some of them, in the order of `rows`, each once."""
        members = self.members
        everybody = Candidates(members.worker_ids, self.columns, None, self.warm, members.even)
        return everybody if len(rows) == len(members.worker_ids) else everybody.only(rows)
