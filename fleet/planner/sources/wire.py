"""Wire format of demand reports: converts them to protobuf messages and back."""

from collections.abc import Sequence
from math import isfinite

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, SampledRequest, WorkerLoad
from fleet.core.duration_counts import EDGES, Counts
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.planner.messages import shortened
from fleet.v1 import control_pb2 as pb

BUCKETS = len(EDGES) + 1
MOST_SECONDS = 1e9
"""Longest duration that a report may contain: 30 years."""

MOST_TOKENS = 1 << 24
"""Highest number of tokens of a prompt or an answer in the sample of requests. No model has a longer context, and a rehearsal
needs memory in proportion to the prompts."""

_ROLES = frozenset(map(str, Role))


class BadDemandReport(Exception):
    """A demand report, or the answer that contains it, cannot be used. The message states the cause, such as the wrong field.

    The message is shortened, because it may quote the answer. It goes into logs and recordings.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(shortened(cause))


def encode_report(report: DemandReport) -> pb.DemandReport:
    return pb.DemandReport(
        router_id=report.router,
        incarnation=report.incarnation,
        uptime_seconds=report.uptime / SECOND,
        models=[
            pb.ModelDemand(
                model=each.model,
                arrivals=each.arrivals,
                waited=each.waited,
                refused=each.refused,
                abandoned=each.abandoned,
                invalid=each.invalid,
                prompt_tokens=each.prompt_tokens,
                uncounted_tokens=each.uncounted_tokens,
                prompt_squares=each.prompt_squares,
                answer_squares=each.answer_squares,
                cached_tokens=each.cached_tokens,
                finished=each.finished,
                answer_tokens=each.answer_tokens,
                ttft=each.ttft,
                tpot=each.tpot,
                queue_wait=each.queue_wait,
                queued=each.queued,
                oldest_seconds=each.oldest_seconds,
                overflowed=each.overflowed,
                overflow_dollars=each.overflow_dollars,
            )
            for each in report.models
        ],
        workers=[
            pb.WorkerDemand(
                worker_id=each.worker_id,
                model=each.model,
                role=each.role,
                running=each.running,
                waiting=each.waiting,
                kv_used=each.kv_used,
                speed=each.speed,
                start_seconds=each.start_seconds,
            )
            for each in report.workers
        ],
        recent=[
            pb.SampledRequest(
                model=each.model,
                age_seconds=(report.at - each.arrived) / SECOND,
                prompt_tokens=each.prompt_tokens,
                answer_tokens=each.answer_tokens,
                block_tokens=each.block_tokens,
                block_keys=each.block_keys,
            )
            for each in report.recent
        ],
    )


def decode_report(message: pb.DemandReport, now: Nanos) -> DemandReport:
    """Decode a demand report.

    The message contains ages, which are converted to instants of this process's clock; `now` is the present instant.
    Workers with unknown roles are left out.

    Raises:
        BadDemandReport: A field is missing, negative, not finite or impossibly high, or a histogram has an unknown number of
            buckets.
    """
    if not message.router_id or not message.incarnation:
        raise BadDemandReport("router_id and incarnation: must not be empty")
    return DemandReport(
        router=message.router_id,
        incarnation=Incarnation(message.incarnation),
        at=now,
        uptime=duration(message.uptime_seconds, "uptime_seconds"),
        models=tuple(_model(each) for each in message.models),
        workers=tuple(_worker(each) for each in message.workers if each.role in _ROLES),
        recent=tuple(
            SampledRequest(
                model=ModelName(each.model),
                arrived=Nanos(now - duration(each.age_seconds, "recent.age_seconds")),
                prompt_tokens=_tokens(each.prompt_tokens, "recent.prompt_tokens"),
                answer_tokens=_tokens(each.answer_tokens, "recent.answer_tokens"),
                block_tokens=_tokens(each.block_tokens, "recent.block_tokens"),
                block_keys=tuple(each.block_keys),
            )
            for each in message.recent
        ),
    )


def duration(seconds: float, field: str) -> Nanos:
    """Return a number of seconds in nanoseconds.

    Raises:
        BadDemandReport: The number is negative, not finite or above `MOST_SECONDS`; the message names the field.
    """
    if not 0 <= seconds <= MOST_SECONDS:
        raise BadDemandReport(f"{field}: {seconds} is not a number of seconds from 0 to {MOST_SECONDS:.0e}")
    return Nanos(round(SECOND * seconds))


def _model(message: pb.ModelDemand) -> ModelDemand:
    return ModelDemand(
        model=ModelName(message.model),
        arrivals=message.arrivals,
        waited=message.waited,
        refused=message.refused,
        abandoned=message.abandoned,
        invalid=message.invalid,
        prompt_tokens=message.prompt_tokens,
        uncounted_tokens=message.uncounted_tokens,
        prompt_squares=_number(message.prompt_squares, f"models.{message.model}.prompt_squares"),
        answer_squares=_number(message.answer_squares, f"models.{message.model}.answer_squares"),
        cached_tokens=message.cached_tokens,
        finished=message.finished,
        answer_tokens=message.answer_tokens,
        ttft=_counts(message.ttft, f"models.{message.model}.ttft"),
        tpot=_counts(message.tpot, f"models.{message.model}.tpot"),
        queue_wait=_counts(message.queue_wait, f"models.{message.model}.queue_wait"),
        queued=message.queued,
        oldest_seconds=_number(message.oldest_seconds, f"models.{message.model}.oldest_seconds"),
        overflowed=message.overflowed,
        overflow_dollars=_number(message.overflow_dollars, f"models.{message.model}.overflow_dollars"),
    )


def _worker(message: pb.WorkerDemand) -> WorkerLoad:
    where = f"workers.{message.worker_id}"
    return WorkerLoad(
        worker_id=WorkerId(message.worker_id),
        model=ModelName(message.model),
        role=Role(message.role),
        running=message.running,
        waiting=message.waiting,
        kv_used=_number(message.kv_used, f"{where}.kv_used"),
        speed=_number(message.speed, f"{where}.speed") or 1.0,
        start_seconds=_number(message.start_seconds, f"{where}.start_seconds"),
    )


def _counts(counts: Sequence[int], field: str) -> Counts:
    if len(counts) not in (0, BUCKETS):
        raise BadDemandReport(f"{field}: has {len(counts)} buckets, and this version knows {BUCKETS}")
    return tuple(counts)


def _tokens(count: int, field: str) -> int:
    if count > MOST_TOKENS:
        raise BadDemandReport(f"{field}: {count} is above {MOST_TOKENS}, and no context is that long")
    return count


def _number(value: float, field: str) -> float:
    if not isfinite(value) or value < 0:
        raise BadDemandReport(f"{field}: {value} is not a number from 0")
    return value
