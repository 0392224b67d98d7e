"""Candidate table: all workers of a model for one request, with their loads and with what each of them holds of the prompt."""

from collections.abc import Sequence

from msgspec import Struct

from fleet.router.candidates import Candidates, Flags, Floats, Rows
from fleet.router.placement.topology import PoolTopology


class ServingWorkers(Struct, frozen=True):
    """The workers that take requests, until the next one drains or resumes."""

    draining: Flags
    able: Flags  # not draining
    answering: Flags  # the able workers that decode
    rows: Rows  # rows of the answering workers

    @classmethod
    def of(cls, members: PoolTopology, draining: Flags) -> "ServingWorkers":
        answering = ~draining & members.decodes
        return cls(draining, ~draining, answering, answering.nonzero()[0])


class CandidateTable(Struct, frozen=True, eq=False):
    """All workers of a model for one request. Nothing in it changes, so that the decision can be explained later."""

    members: PoolTopology
    columns: Floats  # the quantities of `fleet.router.policy`
    serving: ServingWorkers
    failed: Flags | None = None  # workers that failed this request in this incarnation; None: none
    warm: bool = True  # a worker may hold a part of the prompt
    homes: Sequence[
        Flags
    ] = ()  # groups of workers for the request's LoRA adapter, the best first (`fleet.router.state.lora`)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def draining(self) -> Flags:
        return self.serving.draining

    @property
    def able(self) -> Flags:
        """The workers that take requests: neither draining nor failed."""
        return self.serving.able if self.failed is None else self.serving.able & ~self.failed

    @property
    def answering(self) -> Flags:
        """The able workers that decode."""
        return self.serving.answering if self.failed is None else self.serving.answering & ~self.failed

    def candidates(self, rows: Rows) -> Candidates:
        """Return some of the workers, in the order of `rows`, each once."""
        members = self.members
        everybody = Candidates(members.worker_ids, self.columns, None, self.warm, members.even)
        return everybody if len(rows) == len(members.worker_ids) else everybody.only(rows)
