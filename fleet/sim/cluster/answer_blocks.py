"""Names for the blocks of answers, so that the next turn of a conversation finds them where it repeats the answer.

A trace names the blocks of prompts only. The prompt of a next turn has all blocks of the prompt before it, and then those that the
rest of that prompt and its answer fill, under names that nobody knew while the answer was generated. So:

1. The blocks of an answer get names of our own. When a prompt comes that continues another, its names for these blocks mean ours
   from then on, in every prompt.
2. A prompt continues another that it has all full blocks of, if it is longer than that one with its answer, and of the same session
   where sessions are known. It must be the last full block of that other prompt which nobody had before: else it may be a system
   prompt that they share.
3. `REMEMBERED` prompts and as many names are remembered; the oldest are forgotten first.

Pure.
"""

from collections import OrderedDict

from msgspec import Struct

from kvstore.eviction.trace_replay import TraceRequest

REMEMBERED = 1 << 18
OURS = 1 << 63  # from here on; names of traces are below


class _AnsweredPrompt(Struct, frozen=True, gc=False):
    """A prompt and its answer."""

    blocks: int  # full ones of the prompt
    tokens: int  # of both
    answer: tuple[int, ...]  # names of the blocks that are full with the answer
    session: int


class AnswerBlockNames:
    """All conversations."""

    def __init__(self, block_tokens: int, remembered: int = REMEMBERED):
        self._block_tokens = block_tokens
        self._remembered = remembered
        self._turns: OrderedDict[int, _AnsweredPrompt] = OrderedDict()  # by the name of the prompt's last full block
        self._seen: OrderedDict[int, None] = OrderedDict()  # blocks of prompts
        self._ours: OrderedDict[int, int] = OrderedDict()  # by the trace's names
        self._next = OURS

    def named(self, request: TraceRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Names of a prompt's full blocks, and of those that its answer will fill."""
        size = self._block_tokens
        blocks = request.prompt_tokens // size
        theirs = request.chain[:blocks]
        self._learn(request, theirs)
        ours = self._ours
        chain = tuple([ours.get(name, name) for name in theirs]) if ours else theirs
        tokens = request.prompt_tokens + request.output_tokens
        count = max(0, (tokens - 1) // size - blocks)  # the last token's KV is never computed
        answer = tuple(range(self._next, self._next + count))
        self._next += count
        if count and len(chain) == blocks and blocks and theirs[-1] not in self._seen:
            self._turns[theirs[-1]] = _AnsweredPrompt(blocks, tokens, answer, request.session)
        self._seen.update(dict.fromkeys(theirs))
        self._forget()
        return chain, answer

    def _learn(self, request: TraceRequest, theirs: tuple[int, ...]) -> None:
        """What the trace's names for the blocks of the answer before mean."""
        for name in reversed(theirs):
            turn = self._turns.get(name)
            if turn is None:
                continue
            if turn.tokens <= request.prompt_tokens and turn.session == request.session:
                names = theirs[turn.blocks : turn.blocks + len(turn.answer)]
                self._ours.update(zip(names, turn.answer, strict=False))
            del self._turns[name]  # who comes next goes on from here, or has regenerated the answer
            return

    def _forget(self) -> None:
        for known in (self._turns, self._seen, self._ours):
            while len(known) > self._remembered:
                known.popitem(last=False)
