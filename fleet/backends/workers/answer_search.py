"""Answer search: asks the workers for the tokens of answers whose streams are to be resumed.

Rules:

1. Every worker is asked that keeps answers (`workers.answer_keeper`), because an answer may have moved to another worker
   since its key was chosen. The search ends as soon as one worker has all wanted tokens, when all workers have answered
   or left, or after `SEARCH_SECONDS`. A worker with a key has the tokens that were sent under this key, so the first
   complete result is right.
2. After the death of a router, all its streams are resumed at once. So the searches that begin in one turn of the event
   loop are sent together, in one message to each worker.
"""

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES
from fleet.core.work import AnswersWanted, KeptAnswers, WantedAnswer

SEARCH_SECONDS = 0.5  # an idle worker on another host answers within milliseconds
ANSWERS_A_MESSAGE = 1000  # maximum number of searches in one message; 20 kB


class _Search(Struct, eq=False):
    num_bytes: int  # of the wanted tokens
    found: bytes
    asked: set[WorkerId]  # workers that have not answered yet
    ended: asyncio.Event
    is_sent: bool = False


class AnswerSearch:
    """Searches the workers of one router for kept answers."""

    def __init__(self, send: Callable[[AnswersWanted], Sequence[WorkerId]]) -> None:
        """Start without searches.

        Args:
            send: Sends a message to all workers that keep answers; returns those to which it was sent.
        """
        self._send = send
        self._searches: dict[int, list[_Search]] = {}  # by the answer's key
        self._unsent: list[tuple[WantedAnswer, _Search]] = []

    async def tokens(self, key: int, most: int) -> tuple[int, ...]:
        """Return the first tokens of an answer, at most `most`, as far as a worker has them.

        Args:
            key: The key of the answer (`Start.answer_key`).
            most: Number of wanted tokens, those that the client has.
        """
        if not most:
            return ()
        search = _Search(TOKEN_BYTES * most, b"", set(), asyncio.Event())
        self._searches.setdefault(key, []).append(search)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_searches)
        self._unsent.append((WantedAnswer(key, most), search))
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                await search.ended.wait()
        except TimeoutError:
            pass  # what was found until now is the result
        finally:
            others = self._searches[key]
            others.remove(search)
            if not others:
                del self._searches[key]
        return tuple(memoryview(search.found).cast("I"))

    def heard(self, worker_id: WorkerId, kept: KeptAnswers) -> None:
        """Take the tokens that a worker has sent."""
        for each in kept.answers:
            for search in self._searches.get(each.key, ()):
                if len(each.tokens) > len(search.found):
                    search.found = each.tokens[: search.num_bytes]
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
        for first in range(0, len(unsent), ANSWERS_A_MESSAGE):
            some = unsent[first : first + ANSWERS_A_MESSAGE]
            asked = self._send(AnswersWanted(answers=tuple([wanted for wanted, _ in some])))
            for _, search in some:
                search.asked, search.is_sent = set(asked), True
                _end_if_done(search)


def _end_if_done(search: _Search) -> None:
    if len(search.found) >= search.num_bytes or (search.is_sent and not search.asked):
        search.ended.set()
