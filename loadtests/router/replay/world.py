"""A router and its engines in virtual time: arrivals, steps and nothing else, from one heap of events."""

import heapq
import random
from collections import OrderedDict
from itertools import count

from fleet.clock import Nanos
from fleet.ids import Incarnation, ModelName, RequestId, WorkerId
from fleet.requests import TOKEN_BYTES, Finish, Sampling
from fleet.roles import Placement, Role
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    CacheAssumed,
    Command,
    Complete,
    Dispatch,
    Refuse,
    Stepped,
    WorkerJoined,
    request_of,
)
from fleet.router.policies.ports import Policy
from fleet.router.settings import RouterSettings
from fleet.work import Description, Progress
from loadtests.router.replay.engine import Device, Engine, Job
from loadtests.router.replay.outcome import Goals, Outcome, Served, outcome
from loadtests.router.replay.workloads import Session, Turn, Workload

MODEL = ModelName("model")
LONGEST = 1 << 24  # tokens: nothing is refused for its length
ARRIVES, STEPS = 0, 1
SLACK_SECONDS, PACES = 0.5, 5.0  # of the goals
PATIENT = RouterSettings(explained_requests=1, max_queued=1_000_000, max_queue_seconds=1e9)
"""Nobody is refused for having to wait: what does not keep up shows in the times."""


class World:
    """One replay."""

    def __init__(self, workload: Workload, workers: int, device: Device, policy: Policy, seed: int):
        self.engines = [Engine(device, workload.block_tokens) for _ in range(workers)]
        self.served: list[Served] = []
        self.refused = 0
        self.machine = RouterMachine(PATIENT, random.Random(seed), policy)
        self._workload = workload
        self._ids = [WorkerId(f"w{number}") for number in range(workers)]
        self._places = {worker_id: number for number, worker_id in enumerate(self._ids)}
        self._events: list[tuple[Nanos, int, int, int, int]] = []  # when, order, what, worker or session, turn or due
        self._order = count()
        self._requests: dict[RequestId, tuple[int, int, Nanos]] = {}  # session, turn, arrival
        self._open: dict[RequestId, Served] = {}  # by request
        self._zeros = bytes(TOKEN_BYTES * max(turn.prompt_tokens for each in workload.sessions for turn in each.turns))
        for worker_id in self._ids:
            self._hear(Nanos(0), _joined(worker_id, workload.block_tokens, device))
        for number, session in enumerate(workload.sessions):
            self._at(session.start, ARRIVES, number, 0)

    def run(self, goals: Goals) -> Outcome:
        while self._events:
            now, _, what, number, detail = heapq.heappop(self._events)
            if what == ARRIVES:
                self._arrive(now, number, detail)
            elif self.engines[number].due == now:  # else the step was cut short, and has another event
                self._step(now, number)
        self.machine.check()
        for engine in self.engines:
            engine.check()
        busy = Nanos(sum(engine.busy for engine in self.engines))
        return outcome(self.served, self.refused, len(self.engines), goals, busy)

    def _at(self, when: Nanos, what: int, number: int, detail: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, number, detail))

    def _arrive(self, now: Nanos, number: int, index: int) -> None:
        session: Session = self._workload.sessions[number]
        turn: Turn = session.turns[index]
        request_id = RequestId(f"{number}.{index}")
        self._requests[request_id] = (number, index, now)
        arrived = Arrived(
            request_id=request_id,
            model=MODEL,
            tokens=self._zeros[: TOKEN_BYTES * turn.prompt_tokens],
            sampling=Sampling(max_tokens=turn.output_tokens, temperature=0.0),
            session=session.name,
            placement=Placement.AGGREGATED,
            keys={self._workload.block_tokens: tuple(turn.chain)},
        )
        self._hear(now, arrived)

    def _step(self, now: Nanos, number: int) -> None:
        engine, worker_id = self.engines[number], self._ids[number]
        told = engine.step()
        if told.stored or told.removed:
            self._hear(now, CacheAssumed(worker_id=worker_id, stored=told.stored, removed=told.removed))
        progress = [Progress(request_id=job.id, token_ids=(0,)) for job in told.began]
        for job in told.began:
            served = self._open[request_of(job.id)]
            served.first, served.hit_tokens = now, job.hits
        for job in told.ended:
            request_id = request_of(job.id)
            served = self._open.pop(request_id)
            served.ended = now
            self.served.append(served)
            progress.append(Progress(request_id=job.id, token_ids=(0,) * (job.output_tokens - 1), finish=Finish.LENGTH))
        if progress:
            self._hear(now, Stepped(worker_id=worker_id, progress=tuple(progress)))
        if engine.due is not None:
            self._at(engine.due, STEPS, number, 0)

    def _hear(self, now: Nanos, event: Arrived | CacheAssumed | Stepped | WorkerJoined) -> None:
        for command in self.machine.handle(event, now):
            self._obey(now, command)

    def _obey(self, now: Nanos, command: Command) -> None:
        match command:
            case Dispatch():
                request_id = request_of(command.start.request_id)
                number, index, arrived = self._requests[request_id]
                turn = self._workload.sessions[number].turns[index]
                place = self._places[command.worker_id]
                self._open[request_id] = Served(
                    worker=place,
                    prompt_tokens=turn.prompt_tokens,
                    output_tokens=turn.output_tokens,
                    hit_tokens=0,
                    arrived=arrived,
                    first=now,
                    ended=now,
                )
                job = Job(
                    id=command.start.request_id,
                    chain=turn.chain,
                    prompt_tokens=turn.prompt_tokens,
                    output_tokens=turn.output_tokens,
                )
                engine = self.engines[place]
                if engine.add(job, now) and engine.due is not None:
                    self._at(engine.due, STEPS, place, 0)
            case Complete() | Refuse():
                self.refused += isinstance(command, Refuse)
                number, index, _ = self._requests.pop(command.request_id)
                turns = self._workload.sessions[number].turns
                if index + 1 < len(turns):
                    self._at(Nanos(now + turns[index + 1].pause), ARRIVES, number, index + 1)
            case _:
                pass


def _joined(worker_id: WorkerId, block_tokens: int, device: Device) -> WorkerJoined:
    description = Description(
        worker_id=worker_id,
        incarnation=Incarnation("1"),
        model=MODEL,
        role=Role.BOTH,
        block_tokens=block_tokens,
        max_model_len=LONGEST,
        kv_blocks=device.kv_tokens // block_tokens,
        max_running=device.max_running,
        fingerprint="f",
        engine="replayed",
    )
    return WorkerJoined(description=description, address=f"unix:/{worker_id}")


def goals_of(device: Device) -> Goals:
    """The first token within half a second beyond twice the prompt's own time, the others at five idle steps each."""
    latency = device.latency
    return Goals(
        ttft_seconds=SLACK_SECONDS,
        ttft_seconds_per_token=2 * latency.prefill_ms_per_token / 1000,
        tpot_seconds=PACES * latency.step_base_ms / 1000,
    )


def ideal_rate(workload: Workload, workers: int, device: Device) -> float:
    """Requests a second that engines would just keep up with that had one cache together, as large as all, and no imbalance.

    Work of a request: what that cache does not have of its prompt, and its share of decode steps in a batch that is half full.
    """
    latency = device.latency
    room = workers * device.kv_tokens // workload.block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    milliseconds = 0.0
    half = max(1, device.max_running // 2)
    for session in sorted(workload.sessions, key=lambda each: each.start):
        for turn in session.turns:
            hits = next((place for place, key in enumerate(turn.chain) if key not in cache), len(turn.chain))
            for key in reversed(turn.chain):
                cache.pop(key, None)
                cache[key] = None
            while len(cache) > room:
                cache.popitem(last=False)
            unseen = max(1, turn.prompt_tokens - hits * workload.block_tokens)
            context = turn.prompt_tokens + turn.output_tokens / 2
            milliseconds += unseen * latency.prefill_ms_per_token
            milliseconds += turn.output_tokens * (
                latency.step_base_ms / half + latency.step_ms_per_sequence + latency.step_ms_per_context_token * context
            )
    return workers * workload.requests / (milliseconds / 1000)
