"""Router statistics: counters, explanations of recent decisions, and how accurate the router's view of the caches is.

Rules:

1. The explanations of the latest `explained_requests` requests are kept, whether these have ended or not. A request that reuses
   an id replaces the older request.
2. Predicted and reported cached tokens are compared once for each prompt, on the worker that computed it
   (`fleet.router.kv_index.cache_accuracy`).
"""

from collections import OrderedDict
from collections.abc import Callable

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.router.kv_index.cache_accuracy import CacheComparison, Knowledge, compare
from fleet.router.messages import CacheDriftChanged
from fleet.router.placement.decision import Decision
from fleet.router.placement.wait_or_reject import RejectionCause
from fleet.router.policy import PlacementPolicy
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.snapshot import Explanation, KnowledgeSnapshot, RouterCounters
from fleet.router.state.worker_table import RegisteredWorker


class RouterStatistics:
    """Statistics of one router since its start."""

    def __init__(self, explained_requests: int) -> None:
        self.counters = RouterCounters()
        self._most_explained = explained_requests
        self._explained: OrderedDict[RequestId, tuple[Decision, ...]] = OrderedDict()  # finds its first key fast
        self._compared = dict.fromkeys(Knowledge, CacheComparison())
        self._prompts_compared = dict.fromkeys(Knowledge, 0)

    def arrived(self, request_id: RequestId) -> None:
        """Forget an older request with the same id."""
        self._explained.pop(request_id, None)

    def placed(self, live: LiveRequest, decision: Decision, policy: PlacementPolicy) -> None:
        """Count and keep a decision; `policy` is the one that should have made it."""
        self.counters.placed(decision, policy)
        if live.sent:
            self.counters.continued += 1
        self._explained[live.id] = (*self._explained.get(live.id, ()), decision)
        if len(self._explained) > self._most_explained:
            self._explained.popitem(last=False)

    def impossible(self, cause: RejectionCause) -> None:
        """Count a request that no worker could serve."""
        causes = self.counters.impossible
        causes[cause] = causes.get(cause, 0) + 1

    def refused(self, reason: Reason) -> None:
        """Count a rejected request."""
        refused = self.counters.refused
        refused[reason] = refused.get(reason, 0) + 1

    def compare(self, decision: Decision, worker: RegisteredWorker, reported_tokens: int) -> CacheDriftChanged | None:
        """Compare the cached tokens that a decision predicted with those that the worker reported.

        Returns:
            The command to give if the worker's cache begins to drift, or no longer drifts.
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
        """Return why a request was placed as it was; None if that is too long ago or it was never placed."""
        placements = self._explained.get(request_id)
        return None if placements is None else Explanation(placements=tuple(each.explained() for each in placements))

    def knowledge(
        self, recent: Callable[[Knowledge], tuple[int, int, CacheComparison]]
    ) -> tuple[KnowledgeSnapshot, ...]:
        """Return how accurately the caches of workers are known.

        Args:
            recent: Returns, for one kind of knowledge, the number of workers, how many of them drift, and their latest comparisons.
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
