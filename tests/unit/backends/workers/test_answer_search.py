"""Answer search: tests of the rules in `fleet.backends.workers.answer_search`."""

import asyncio

from fleet.backends.workers import answer_search
from fleet.backends.workers.answer_search import AnswerSearch
from fleet.core.ids import WorkerId
from fleet.core.work import AnswersWanted, KeptAnswer, KeptAnswers, WantedAnswer
from tests.support.builders import token_bytes
from tests.support.waiting import turns, until

A, B = WorkerId("a"), WorkerId("b")


class Cluster:
    """The workers that a search asks."""

    def __init__(self, *workers: WorkerId) -> None:
        self.workers = workers
        self.asked: list[AnswersWanted] = []
        self.search = AnswerSearch(self._send)

    def _send(self, wanted: AnswersWanted) -> tuple[WorkerId, ...]:
        self.asked.append(wanted)
        return self.workers

    async def begin(self, key: int, most: int) -> "asyncio.Task[tuple[int, ...]]":
        """Begin a search, wait until the workers are asked, and return the task of the search."""
        task = asyncio.create_task(self.search.tokens(key, most))
        await until(lambda: self.asked)
        return task

    def answer(self, worker_id: WorkerId, key: int, *token_ids: int, wanted: int = 3) -> None:
        kept = KeptAnswer(key, token_bytes(token_ids), wanted)
        self.search.received(worker_id, KeptAnswers(answers=(kept,)))


async def test_first_worker_with_all_tokens_ends_the_search():
    cluster = Cluster(A, B)
    search = await cluster.begin(7, 3)
    cluster.answer(A, 7, 1, 2)
    await turns()
    assert not search.done()
    cluster.answer(B, 7, 1, 2, 3)

    assert await search == (1, 2, 3)


async def test_search_ends_when_every_worker_has_answered_or_left():
    cluster = Cluster(A, B)
    search = await cluster.begin(7, 3)
    cluster.answer(A, 7, 1)
    await turns()
    assert not search.done()
    cluster.search.left(B)

    assert await search == (1,)


async def test_silent_worker_delays_a_search_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(answer_search, "SEARCH_SECONDS", 0.05)
    cluster = Cluster(A, B)
    search = await cluster.begin(7, 3)
    cluster.answer(A, 7, 1)

    assert await search == (1,)
    cluster.answer(B, 7, 1, 2, 3)  # too late, and harmless


async def test_search_without_workers_or_wanted_tokens_ends_at_once():
    assert await Cluster().search.tokens(7, 3) == ()
    cluster = Cluster(A)
    assert await cluster.search.tokens(7, 0) == ()
    assert cluster.asked == []


async def test_searches_of_one_turn_are_sent_together(monkeypatch):
    monkeypatch.setattr(answer_search, "MAX_WANTED_ANSWERS", 2)
    cluster = Cluster(A)
    searches = [asyncio.create_task(cluster.search.tokens(key, 1)) for key in (5, 6, 7)]
    await until(lambda: cluster.asked)
    assert [message.answers for message in cluster.asked] == [
        (WantedAnswer(5, 1), WantedAnswer(6, 1)),
        (WantedAnswer(7, 1),),
    ]
    for key in (5, 6, 7):
        cluster.answer(A, key, 10 * key)

    assert await asyncio.gather(*searches) == [(50,), (60,), (70,)]


async def test_two_searches_for_one_answer_each_get_what_they_want():
    cluster = Cluster(A)
    first = await cluster.begin(7, 3)
    second = asyncio.create_task(cluster.search.tokens(7, 1))
    await turns()  # the second search has begun, but has not asked the workers yet
    cluster.answer(A, 7, 1, 2, 3)

    assert (await first, await second) == ((1, 2, 3), (1,))


async def test_searches_for_one_answer_are_sent_once():
    """Resume an answer many times at once: the workers are asked only once."""
    cluster = Cluster(A)
    searches = [await cluster.begin(7, 3)]
    searches += [asyncio.create_task(cluster.search.tokens(7, 3)) for _ in range(100)]
    searches[0].cancel()  # as if its client had left; the other searches still wait
    await turns()
    cluster.answer(A, 7, 1, 2, 3)

    assert await asyncio.gather(*searches[1:]) == [(1, 2, 3)] * 100
    assert cluster.asked == [AnswersWanted(answers=(WantedAnswer(7, 3),))]


async def test_answer_to_a_smaller_question_does_not_end_a_search():
    cluster = Cluster(A)
    await cluster.begin(7, 1)
    cluster.asked.clear()
    search = await cluster.begin(7, 3)
    cluster.answer(A, 7, 1, wanted=1)
    await turns()
    assert not search.done()
    cluster.answer(A, 7, 1, 2, 3)

    assert await search == (1, 2, 3)


async def test_cancelled_search_leaves_nothing_behind():
    cluster = Cluster(A)
    search = await cluster.begin(7, 3)
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)

    cluster.answer(A, 7, 1)
    cluster.asked.clear()
    again = await cluster.begin(7, 1)
    assert not again.done()
    cluster.answer(A, 7, 1)
    assert await again == (1,)
