"""Answer blocks: an answer as a sequence of reasoning, text and tool calls, as the Responses and Messages APIs show it."""

from collections.abc import Iterator
from enum import Enum, auto

from msgspec import Struct

from fleet.core.requests import Delta


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class AnswerBlock(Struct, kw_only=True):
    """One block of an answer. Its joined `pieces` are the text, the reasoning, or the arguments of the tool call as JSON."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str]

    @property
    def content(self) -> str:
        return "".join(self.pieces)


class BlockBegun(Struct, frozen=True):
    block: AnswerBlock


class BlockGrown(Struct, frozen=True):
    block: AnswerBlock
    piece: str


class BlockEnded(Struct, frozen=True):
    block: AnswerBlock


BlockChange = BlockBegun | BlockGrown | BlockEnded


class AnswerBlocks:
    """Divides one answer into blocks while it arrives. At most one block, the last one, is still open."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._call = -1  # index of the latest tool call in the answer; -1: there is none yet

    def add(self, delta: Delta) -> Iterator[BlockChange]:
        """Add the next part of the answer; yield the changes of blocks."""
        if delta.reasoning:
            yield from self._grow(BlockKind.REASONING, delta.reasoning)
        if delta.text:
            yield from self._grow(BlockKind.TEXT, delta.text)
        for call in delta.calls:
            if self._open is None or self._open.kind is not BlockKind.CALL or self._call != call.index:
                self._call = call.index
                yield from self._begin(BlockKind.CALL, call.id, call.name)
            if call.arguments:
                yield from self._grow(BlockKind.CALL, call.arguments)

    def finish(self, text: str) -> Iterator[BlockChange]:
        """Add the last text and end the answer; yield the changes of blocks. An answer without blocks gets an empty text block."""
        if text:
            yield from self._grow(BlockKind.TEXT, text)
        if not self.blocks:
            yield from self._begin(BlockKind.TEXT)
        yield from self._end()

    def _grow(self, kind: BlockKind, piece: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(piece)
        yield BlockGrown(self._open, piece)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[BlockChange]:
        yield from self._end()
        self._open = AnswerBlock(index=len(self.blocks), kind=kind, call_id=call_id, name=name, pieces=[])
        self.blocks.append(self._open)
        yield BlockBegun(self._open)

    def _end(self) -> Iterator[BlockChange]:
        if (ended := self._open) is not None:
            self._open = None
            yield BlockEnded(ended)
