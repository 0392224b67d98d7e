"""What a router can tell of what it has done: counters, why requests went where they went, and how right it was about caches.

Rules:

1. Why is kept of the latest requests alone, `explained_requests` of them, whether they have ended or not. A request that comes under
   the id of an older one takes its place.
2. What was believed to be cached is compared with what was (`fleet.router.kv_index.cache_accuracy`) once a prompt, on the worker that computed it.
"""

from collections import OrderedDict
from collections.abc import Callable

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.router.kv_index.cache_accuracy import CacheComparison, Knowledge, compare
from fleet.router.messages import CacheDriftChanged
from fleet.router.placement.decision import Decision
from fleet.router.placement.rejection import RejectionCause
from fleet.router.policy import PlacementPolicy
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.snapshot import Explanation, KnowledgeSnapshot, RouterCounters
from fleet.router.state.worker_table import RegisteredWorker


class RouterStatistics:
    """Of one router, since its start."""

    def __init__(self, explained_requests: int) -> None:
        """Nothing was done.

        Args:
            explained_requests: How many are remembered.
        """
        self.counters = RouterCounters()
        self._most_explained = explained_requests
        self._explained: OrderedDict[RequestId, list[Decision]] = OrderedDict()  # a dict's first key is slow to find
        self._compared = dict.fromkeys(Knowledge, CacheComparison())
        self._prompts_compared = dict.fromkeys(Knowledge, 0)

    def arrived(self, request_id: RequestId) -> None:
        """A request has."""
        self._explained.pop(request_id, None)

    def placed(self, live: LiveRequest, decision: Decision, policy: PlacementPolicy) -> None:
        """A request was; `policy` should have decided."""
        self.counters.placed(decision, policy)
        if live.sent:
            self.counters.continued += 1
        self._explained.setdefault(live.id, []).append(decision)
        if len(self._explained) > self._most_explained:
            self._explained.popitem(last=False)

    def impossible(self, cause: RejectionCause) -> None:
        """Nobody could serve a request."""
        causes = self.counters.impossible
        causes[cause] = causes.get(cause, 0) + 1

    def refused(self, reason: Reason) -> None:
        """A request was."""
        refused = self.counters.refused
        refused[reason] = refused.get(reason, 0) + 1

    def compare(self, decision: Decision, worker: RegisteredWorker, reported_tokens: int) -> CacheDriftChanged | None:
        """What was believed to be cached where a prompt was computed, against what was.

        Returns:
            What to tell, if the worker's cache begins to drift by that, or does no more.
        """
        accuracy, prompt = worker.accuracy, decision.request.prompt_tokens
        predicted = prompt - decision.prefill_tokens
        compared = compare(prompt, predicted, reported_tokens, worker.description.block_tokens)
        self._compared[accuracy.knowledge] += compared
        self._prompts_compared[accuracy.knowledge] += 1
        if not accuracy.note(compared):
            return None
        return CacheDriftChanged(
            worker_id=worker.description.worker_id,
            knowledge=accuracy.knowledge,
            drifting=accuracy.drifting,
            precision=accuracy.recent.precision,
            recall=accuracy.recent.recall,
        )

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request went where it went; None for one too long ago, or never placed."""
        placements = self._explained.get(request_id)
        return None if placements is None else Explanation(placements=tuple(each.explained() for each in placements))

    def knowledge(
        self, recent: Callable[[Knowledge], tuple[int, int, CacheComparison]]
    ) -> tuple[KnowledgeSnapshot, ...]:
        """How well it is known what workers have cached.

        Args:
            recent: Of those workers that are here: how many, how many of them drift, and the sum of the latest comparisons.
        """
        found = []
        for knowledge in Knowledge:
            workers, drifting, lately = recent(knowledge)
            found.append(
                KnowledgeSnapshot(
                    knowledge=knowledge,
                    workers=workers,
                    drifting=drifting,
                    prompts=self._prompts_compared[knowledge],
                    total=self._compared[knowledge],
                    recent=lately,
                )
            )
        return tuple(found)
