"""Novel work: which kinds of work an engine does for the first time."""

import pytest

from fleet.core.ids import RequestId
from fleet.core.requests import Choice, Sampling
from workers.engines.novel_work import NovelWork

A, B = RequestId("a"), RequestId("b")
GREEDY = Sampling(temperature=0)


def that_has_done(*kinds: Sampling) -> NovelWork:
    novel = NovelWork()
    for sampling in kinds:
        novel.begun(A, sampling, loads=False)
        novel.brought(A)
    return novel


def test_first_request_is_novel_until_it_yields_tokens():
    novel = NovelWork()
    novel.begun(A, GREEDY, loads=False)
    assert novel

    novel.brought(A)

    assert not novel
    novel.begun(B, GREEDY, loads=False)
    assert not novel


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1),
        Sampling(temperature=0, logprobs=2),
        Sampling(temperature=0, form=Choice(("no", "yes"))),
        Sampling(temperature=0, repetition_penalty=1.1),
        Sampling(temperature=0, presence_penalty=-1),
        Sampling(temperature=0, seed=0),
        Sampling(temperature=0, top_k=1),
        Sampling(temperature=0, min_tokens=1),
    ],
)
def test_request_with_other_kernels_is_novel(sampling):
    novel = that_has_done(GREEDY)

    novel.begun(B, sampling, loads=False)

    assert novel


def test_adapter_load_is_novel_each_time():
    novel = that_has_done(GREEDY)

    novel.begun(B, GREEDY, loads=True)

    assert novel


def test_request_without_tokens_proves_nothing():
    novel = NovelWork()
    novel.begun(A, GREEDY, loads=False)
    novel.ended(A)
    assert not novel

    novel.begun(B, GREEDY, loads=False)

    assert novel
