"""Traffic from recordings: reads the requests in a router's recording (`fleet serve router --record`), for a simulation.

The answer of a request has the recorded length. If the request was rejected, not finished, or cancelled before its first token, its answer
gets the maximum length that the client asked for. Requests are yielded in the order of their arrival. So while the end of a request has not
been read, all later requests are held in memory. The models of the recording are treated as one model.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import TOKEN_BYTES
from fleet.recording.format import RecordedCompletion, RecordedEmit, RecordedRejection
from fleet.recording.reader import RecordedEvent, Recording, RecordingError
from fleet.recording.trace_rows import TraceError, UnsharedNames
from fleet.router.messages import Arrived, RequestCancelled, WorkerJoined
from kvstore.eviction.trace_replay import TraceRequest


class _HeldRequest(Struct):
    """A request that cannot be yielded yet, because its own end, or the end of an earlier request, has not been read."""

    arrival: Nanos
    prompt_tokens: int
    chain: tuple[int, ...]
    asked_tokens: int
    session: int
    answered: int = 0
    over: bool = False
    complete: bool = False


def recorded_block_tokens(path: Path) -> int | None:
    """Return the block size in tokens of the first worker that joined; None if no worker joined.

    Raises:
        TraceError: The file cannot be read or is no recording, or a line is malformed.
    """
    for entry in _entries(path):
        if isinstance(entry.event, WorkerJoined):
            return entry.event.description.block_tokens
    return None


def recorded_requests(path: Path, block_tokens: int, chain: UnsharedNames) -> Iterator[TraceRequest]:
    """Yield the requests in the order of their arrival. Times are measured from the first event of the recording.

    Args:
        path: The recording.
        block_tokens: The block size. Recorded block keys are used only if they have this block size.
        chain: A function that makes new block names for a number of tokens. It is called for prompts without recorded keys of this block
            size.

    Raises:
        TraceError: The file cannot be read or is no recording, or a line is malformed.
    """
    held: deque[_HeldRequest] = deque()
    live: dict[RequestId, _HeldRequest] = {}
    sessions: dict[str, int] = {}
    began: Nanos | None = None
    for entry in _entries(path):
        began = entry.now if began is None else began
        event = entry.event
        if isinstance(event, Arrived):
            tokens = len(event.tokens) // TOKEN_BYTES
            held.append(
                _HeldRequest(
                    arrival=Nanos(entry.now - began),
                    prompt_tokens=tokens,
                    chain=_names(entry, event, tokens, block_tokens) or chain(tokens),
                    asked_tokens=event.sampling.max_tokens,
                    session=sessions.setdefault(event.session, len(sessions) + 1) if event.session else 0,
                )
            )
            live[event.request_id] = held[-1]
        elif isinstance(event, RequestCancelled) and (gone := live.pop(event.request_id, None)) is not None:
            gone.over = True
            # A router also cancels a request when a stop string has ended its answer, so an answer that has tokens counts as complete.
            gone.complete = gone.answered > 0
        _apply_commands(live, entry)
        while held and held[0].over:
            yield _request(held.popleft())
    yield from map(_request, held)


def _entries(path: Path) -> Iterator[RecordedEvent]:
    try:
        yield from Recording(path).entries()
    except RecordingError as error:
        raise TraceError(str(error)) from error


def _names(entry: RecordedEvent, event: Arrived, tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Return the recorded block keys of a prompt's full blocks. Return an empty tuple if none of this block size are recorded."""
    full = tokens // block_tokens
    known = [*(keys for size, keys in event.keys.items() if size == block_tokens), *entry.keys]
    return next((tuple(keys) for keys in known if len(keys) == full and len(set(keys)) == full), ())


def _apply_commands(live: dict[RequestId, _HeldRequest], entry: RecordedEvent) -> None:
    for command in entry.commands or ():
        if isinstance(command, RecordedEmit) and (held := live.get(command.request_id)) is not None:
            held.answered += command.tokens
        elif (
            isinstance(command, RecordedCompletion | RecordedRejection)
            and (held := live.pop(command.request_id, None)) is not None
        ):
            held.over = True
            held.complete = isinstance(command, RecordedCompletion)


def _request(held: _HeldRequest) -> TraceRequest:
    tokens = held.answered if held.complete else held.asked_tokens
    return TraceRequest(held.arrival, held.prompt_tokens, held.chain, tokens, held.session)
