"""Answer search: asks the workers for the tokens of answers that clients resume.

Rules:

1. All workers that keep answers (`workers.answer_keeper`) are asked, because a resume token does not name the worker. The
   search ends as soon as one worker has all wanted tokens, when all workers have answered or left, or after
   `SEARCH_SECONDS`. Each key belongs to a single attempt, so only one worker has tokens under it.
2. After the death of a router, all its streams are resumed at once. So the searches that begin in one turn of the event
   loop are sent together, in one message to each worker.
3. A search for an answer is only sent if no running search wants at least as many tokens of it. Otherwise it waits for the result
   of the running search. So if a client resumes an answer many times at once, the workers still send the answer only once.
"""

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES
from fleet.core.work import MAX_WANTED_ANSWERS, AnswersWanted, KeptAnswers, WantedAnswer

SEARCH_SECONDS = 3.0
"""Time limit of a search. A working worker answers within milliseconds, so only a hanging worker makes a search last this
long. The search waits for it, because the tokens may be nowhere else."""


class _RunningSearch(Struct, eq=False):
    most: int  # number of wanted tokens
    found: bytes
    asked: set[WorkerId]  # workers to which the search was sent, and which have not answered yet
    ended: asyncio.Event
    is_sent: bool = False
    waiting: int = 0  # number of calls of `AnswerSearch.tokens` that wait for the result


class AnswerSearch:
    """Searches the workers of one router for kept answers."""

    def __init__(self, send: Callable[[AnswersWanted], Sequence[WorkerId]]) -> None:
        """Start without searches.

        Args:
            send: Sends a message to all workers that keep answers; returns the workers to which it was sent.
        """
        self._send = send
        self._searches: dict[int, list[_RunningSearch]] = {}  # searches on whose result calls wait, by the answer's key
        self._unsent: list[tuple[WantedAnswer, _RunningSearch]] = []

    async def tokens(self, key: int, most: int) -> tuple[int, ...]:
        """Return the first `most` tokens of an answer; fewer or none if no worker is found that has all of them.

        Args:
            key: The key of the answer (`Start.answer_key`).
            most: Number of wanted tokens: as many as the client has.
        """
        if not most:
            return ()
        running = self._searches.setdefault(key, [])
        search = next((each for each in running if each.most >= most), None) or self._begin(key, most)
        search.waiting += 1
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                await search.ended.wait()
        except TimeoutError:
            pass  # what was found until now is the result
        finally:
            search.waiting -= 1
            if not search.waiting:
                running.remove(search)
                if not running:
                    del self._searches[key]
        return tuple(memoryview(search.found[: TOKEN_BYTES * most]).cast("I"))

    def _begin(self, key: int, most: int) -> _RunningSearch:
        """Begin a search; it is sent at the end of this turn of the event loop."""
        search = _RunningSearch(most, b"", set(), asyncio.Event())
        self._searches[key].append(search)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_searches)
        self._unsent.append((WantedAnswer(key, most), search))
        return search

    def received(self, worker_id: WorkerId, kept: KeptAnswers) -> None:
        """Note the kept tokens that a worker has sent, in each search for their answer. End the searches that are complete."""
        for each in kept.answers:
            for search in self._searches.get(each.key, ()):
                if len(each.tokens) > len(search.found):
                    search.found = each.tokens[: TOKEN_BYTES * search.most]
                if each.wanted >= search.most:  # otherwise the worker has answered another search for the same key
                    search.asked.discard(worker_id)
                _end_if_done(search)

    def left(self, worker_id: WorkerId) -> None:
        """Do not wait for a worker any more, because its stream has ended."""
        for searches in self._searches.values():
            for search in searches:
                if worker_id in search.asked:
                    search.asked.discard(worker_id)
                    _end_if_done(search)

    def _send_searches(self) -> None:
        unsent, self._unsent = self._unsent, []
        for first in range(0, len(unsent), MAX_WANTED_ANSWERS):
            some = unsent[first : first + MAX_WANTED_ANSWERS]
            asked = self._send(AnswersWanted(answers=tuple([wanted for wanted, _ in some])))
            for _, search in some:
                search.asked, search.is_sent = set(asked), True
                _end_if_done(search)


def _end_if_done(search: _RunningSearch) -> None:
    if len(search.found) >= TOKEN_BYTES * search.most or (search.is_sent and not search.asked):
        search.ended.set()
