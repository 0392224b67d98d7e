"""Access log of a router process: a line, a JSON record, or both, for each request that ended or was refused.

With the setting `access_log`, lines go to the log. With `access_records`, records go to a file (`fleet.recording.access_records`).
Lines and records name requests, models and tenants; only the line of a relayed request does not name the model. Lines never contain prompts,
answers or keys. Records never contain keys, and prompts and answers only if the settings enable that.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, Struct, to_builtins

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.requests import (
    CallDelta,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateEvent,
    GenerateRequest,
    KvPhase,
    Prompt,
    TextPrompt,
    Usage,
    join_calls,
)
from fleet.core.roles import Phase
from fleet.core.telemetry import operation_of
from fleet.recording.access_records import AccessRecord, AccessRecordFile, KvRecord, PlacementRecord
from fleet.router.api import RouterApi

log = logging.getLogger("fleet.access")

LONGEST_NAME = 128
"""Maximum number of characters of a name in a line or a record. Longer names are cut, because clients choose the
names."""


class RequestTimes(Struct, frozen=True, kw_only=True):
    """The measured times of one request, in seconds; None if a time could not be measured."""

    whole: float  # from the arrival of the request to its end
    first_token: float | None = None  # from the arrival to the first token
    per_token: float | None = None  # mean time per token after the first one (TPOT)
    longest_gap: float | None = None


class AccessLog:
    """Writes a line, a record or both for each request of one router process, depending on the settings."""

    def __init__(
        self,
        router: RouterApi,
        clock: Clock,
        unix_nanoseconds: Callable[[], int],
        *,
        logs: bool,
        records: AccessRecordFile | None = None,
    ) -> None:
        """Create the access log.

        Args:
            router: The router, which knows how requests were placed.
            clock: The monotonic clock by which arrivals are measured.
            unix_nanoseconds: The wall clock, in nanoseconds since 1970.
            logs: Whether to write a log line for each request.
            records: The file to which records are written; None: no records are written.
        """
        self.router = router
        self.records = records
        self.logs = logs
        self._clock = clock
        self._unix_nanoseconds = unix_nanoseconds

    def begin(self, request: GenerateRequest) -> "AccessEntry":
        """Begin the entry of a request that has just arrived; the caller writes it when the request has ended."""
        return AccessEntry(self, request, self._unix_nanoseconds())

    def relayed(
        self,
        request_id: RequestId,
        *,
        model: str,
        operation: str,
        tenant: str,
        stream: bool,
        reason: Reason | None,
        answer_tokens: int,
        began_at: Nanos,
        first_byte_at: Nanos | None,
        trace_id: str = "",
    ) -> None:
        """Write the line and the record of a request that was relayed to an external server and has ended.

        Args:
            request_id: Id of the request.
            model: Base model of the request.
            operation: Name of the operation (`fleet.frontend.openai.relay.OPERATIONS`), such as ``chat``. The metrics use the same names.
            tenant: Tenant of the request.
            stream: Whether the client wanted a stream.
            reason: Why the request was not served; None if it was served.
            answer_tokens: Approximate number of tokens in the answer.
            began_at: Instant at which the request arrived, by the monotonic clock.
            first_byte_at: Instant at which the answer began, by the same clock; None if there was no answer.
            trace_id: Id of the request's trace; empty if the request is not traced.
        """
        now = self._clock.now()
        seconds = (now - began_at) / SECOND
        outcome = "relayed" if reason is None else reason.value
        if self.logs:
            fields: dict[str, object] = {"request": request_id}
            if tenant:
                fields["tenant"] = quoted(tenant)
            if trace_id:
                fields["trace"] = trace_id
            fields |= {"outcome": outcome, "answer_tokens": answer_tokens}
            log.info("relayed request ended", extra=fields | {"ms": f"{seconds * 1000:.1f}"})
        if self.records is not None:
            arrival = self._unix_nanoseconds() - (now - began_at)
            self.records.write(
                AccessRecord(
                    time=utc(arrival),
                    arrival=arrival,
                    request_id=request_id,
                    trace_id=trace_id,
                    tenant=tenant[:LONGEST_NAME],
                    model=model,
                    operation=operation,
                    stream=stream,
                    external=True,
                    outcome=outcome,
                    placements=self.placements(request_id),
                    output_tokens=answer_tokens,
                    ttft_seconds=None if first_byte_at is None else (first_byte_at - began_at) / SECOND,
                    duration_seconds=seconds,
                )
            )

    def placements(self, request_id: RequestId) -> tuple[PlacementRecord, ...]:
        """Return all placements of a request in the order of time; empty if it was not placed, or the router has forgotten the placements."""
        return tuple(
            PlacementRecord(worker=each.decode, prefill_worker=each.prefill or "", why=each.why)
            for each in self.router.decisions(request_id)
        )


class AccessEntry:
    """Collects what the line and the record of one request show, and writes both when the request has ended."""

    def __init__(self, access: AccessLog, request: GenerateRequest, arrival: int) -> None:
        self._access = access
        self._request = request
        self._arrival = arrival
        self.request_id = request.id
        self.tenant = request.tenant
        self.trace_id = ""  # empty: the request is not traced
        # Time from the arrival at the router machine until a worker was first sent the request; None: it was not sent, or not known yet.
        self.queue_seconds: float | None = None
        self.notes_answer = access.records is not None and access.records.content
        """True if the record shows the prompt and the text of the answer; the caller then calls `note` with each event of the answer."""

        self._answer: list[str] = []
        self._calls: list[CallDelta] = []

    def first_token(self) -> None:
        """Note how long the request was queued.

        Call this at the first token, while the router still knows the request.
        """
        self.queue_seconds = self._access.router.queue_seconds(self.request_id)

    def note(self, event: GenerateEvent) -> None:
        """Note a part of the answer, for a record that shows the answer's text."""
        if isinstance(event, Delta):
            self._answer += (event.reasoning, event.text)
            self._calls += event.calls
        elif isinstance(event, Finished):
            self._answer.append(event.text)

    def write(
        self,
        outcome: Finish | Reason,
        *,
        usage: Usage | None,
        kv: Sequence[KvPhase],
        model: str,
        times: RequestTimes,
    ) -> None:
        """Write the line and the record.

        Args:
            outcome: How the request ended.
            usage: Token counts of the request; None if it was not admitted.
            kv: The KV report of each phase; empty if there is none.
            model: The model that served the request; empty if none did. Line and record then name the requested model.
            times: The measured times of the request.
        """
        placement = ""
        if kv:
            placement = "aggregated" if kv[0].phase is Phase.AGGREGATED else "disaggregated"
        model = model or self._request.model
        if self._access.logs:
            self._write_line(outcome, usage, placement, model, times)
        if self._access.records is not None:
            self._access.records.write(self._record(outcome, usage, placement, kv, model, times))

    def _write_line(
        self, outcome: Finish | Reason, usage: Usage | None, placement: str, model: str, times: RequestTimes
    ) -> None:
        fields: dict[str, object] = {"request": quoted(self.request_id), "model": quoted(model)}
        if self.tenant:
            fields["tenant"] = quoted(self.tenant)
        if self.trace_id:
            fields["trace"] = self.trace_id
        fields["outcome"] = outcome.value
        if placement:
            fields["placement"] = placement
        if usage is not None:
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "answer_tokens": usage.completion_tokens,
            }
        if times.first_token is not None:
            fields["ttft_ms"] = f"{times.first_token * 1000:.1f}"
        fields["ms"] = f"{times.whole * 1000:.1f}"
        log.info("request refused" if usage is None else "request ended", extra=fields)

    def _record(
        self,
        outcome: Finish | Reason,
        usage: Usage | None,
        placement: str,
        kv: Sequence[KvPhase],
        model: str,
        times: RequestTimes,
    ) -> AccessRecord:
        request = self._request
        return AccessRecord(
            time=utc(self._arrival),
            arrival=self._arrival,
            request_id=self.request_id[:LONGEST_NAME],
            trace_id=self.trace_id,
            tenant=self.tenant[:LONGEST_NAME],
            model=model[:LONGEST_NAME],
            operation=operation_of(request),
            session_id=request.session[:LONGEST_NAME],
            stream=not request.whole,
            outcome=outcome.value,
            placement=placement,
            placements=() if usage is None else self._access.placements(self.request_id),
            kv=tuple(_kv_record(each) for each in kv),
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.completion_tokens,
            max_tokens=request.sampling.max_tokens,
            queue_seconds=self.queue_seconds,
            ttft_seconds=times.first_token,
            tpot_seconds=times.per_token,
            itl_max_seconds=times.longest_gap,
            duration_seconds=times.whole,
            prompt=_content(request.prompt) if self.notes_answer else UNSET,
            answer="".join(self._answer) if self.notes_answer else UNSET,
            calls=tuple(join_calls(self._calls)) if self._calls else UNSET,
        )


def _kv_record(phase: KvPhase) -> KvRecord:
    blocks: dict[str, int] = {}
    for origin in phase.report.origins:
        blocks[origin.source] = blocks.get(origin.source, 0) + origin.blocks
    moved = sum(origin.bytes for origin in phase.report.origins)
    return KvRecord(phase=phase.phase, worker=phase.worker_id, blocks=blocks, bytes=moved)


def _content(prompt: Prompt) -> Any:
    """Return a prompt as JSON: a text, a list of messages, or a list of token ids."""
    match prompt:
        case TextPrompt(text=text):
            return text
        case ChatPrompt(messages=messages):
            return to_builtins(messages)
        case _:
            return memoryview(prompt.tokens).cast("I").tolist()


def utc(unix_nanoseconds: int) -> str:
    """Return an instant of the wall clock in ISO 8601, in UTC and with microseconds."""
    at = datetime.fromtimestamp(unix_nanoseconds // 1_000_000_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{unix_nanoseconds % 1_000_000_000 // 1000:06}Z"


def quoted(name: str) -> str:
    """Return a name that a client has chosen, cut to `LONGEST_NAME`.

    A name that could end the log line or look like another field is also quoted.
    """
    short = name[:LONGEST_NAME]
    return short if short.isascii() and short.isprintable() and not {" ", "="} & set(short) else repr(short)
