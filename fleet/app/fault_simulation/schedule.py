"""Schedule: draws the requests and faults of one run of the fault simulation from its seed.

Rules:

1. A schedule is a list of requests and faults, each with its instant and all its parameters.
   `fleet.app.fault_simulation.seed_run` performs them. This module draws them from the seed. From the same seed,
   `seed_run` draws only delays, router settings and the router's choices between equal workers. No request or fault of the
   list depends on another one, so any part of the list is also a valid schedule. The schedule of a failing run can
   therefore be shrunk: requests and faults are left out of it.
2. Faults begin within the span `FAULTS`. They end at the instant `WELL_FROM` at the latest; only an engine that hangs
   while it has requests is left to the watchdog (rule 2 of `fleet.app.fault_simulation.seed_run`).
"""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

from msgspec import Struct, structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.requests import TOKEN_BYTES, Sampling, TokenBytes
from fleet.core.roles import KvPath, Placement, Role

WORKERS = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "b0": Role.BOTH}
ARRIVALS = (Nanos(1_200 * MILLISECOND), Nanos(6 * SECOND))
FAULTS = (Nanos(1 * SECOND), Nanos(7 * SECOND))
WELL_FROM = Nanos(10 * SECOND)
STAGES = ("prefill", "decode", "lend", "pull", "write", "read")
"""Activities of a worker. A fault `FaultKind.KILL_WORKER_AT` or `FREEZE_WORKER_AT` names one of them in `other`. When the
worker next begins this activity, the fault freezes the worker at once, or kills it a moment later."""

FOR_GOOD = Nanos(3600 * SECOND)
"""Duration of a fault that does not end by itself; it lasts until all faults end at `WELL_FROM`."""


class FaultKind(StrEnum):
    KILL_WORKER = "kill worker"
    KILL_WORKER_AT = "kill worker at its next"
    FREEZE_WORKER = "freeze worker"
    FREEZE_WORKER_AT = "freeze worker at its next"
    DRAIN_WORKER = "drain worker"
    HANG_ENGINE = "hang engine"
    FAIL_ENGINE = "fail engine"
    TWIN_WORKER = "start another process with the worker's id"
    CUT = "cut network"
    SLOW = "slow network"
    RESET = "reset connections"
    HALF_CLOSE = "reset connections on one side only"
    FILL_BUFFER = "fill send buffer to worker"
    SPOIL = "spoil messages to the router"
    SKIP = "lose KV events"
    KILL_ROUTER = "kill router"
    FREEZE_ROUTER = "freeze router"
    REGISTRY_AWAY = "registry does not answer"
    KILL_STORE = "kill store"
    FREEZE_STORE = "freeze store"
    FAIL_DISK = "disk fails"
    HANG_DISK = "disk hangs"
    FULL_DISK = "disk is full"
    CORRUPT_DISK = "disk corrupts records"
    DAMAGE_TRANSFER = "damage blocks of direct transfers"
    FLIP_BITS = "flip bits in the pool"


class RequestDrawn(Struct, frozen=True, kw_only=True, tag="request"):
    """A randomly drawn request that a client sends during the run."""

    at: Nanos
    prompt: TokenBytes
    sampling: Sampling
    placement: Placement
    kv_path: KvPath | None
    whole: bool  # True if the client gets the answer in one piece, not as a stream
    deadline: Nanos | None  # time from sending the request to its deadline; None: no deadline
    leaves_after: Nanos | None
    session: str

    def __str__(self) -> str:
        limits = [f"within {self.deadline / SECOND:.2f} s"] if self.deadline is not None else []
        limits += [f"leaves after {self.leaves_after / SECOND:.2f} s"] if self.leaves_after is not None else []
        tokens = f"{len(self.prompt) // TOKEN_BYTES} tokens in, {self.sampling.max_tokens} out"
        return ", ".join([f"{self.at / SECOND:.3f} s: request, {tokens}, {self.placement}", *limits])


class FaultDrawn(Struct, frozen=True, kw_only=True, tag="fault"):
    """A randomly drawn fault: its kind, the processes that it affects, when it begins, and how long it lasts."""

    at: Nanos
    kind: FaultKind
    target: str = ""
    other: str = ""
    lasting: Nanos = Nanos(0)
    amount: int = 0

    def __str__(self) -> str:
        where = "-".join(filter(None, (self.target, self.other)))
        words = [self.kind.value, where, f"x{self.amount}" if self.amount else ""]
        if self.lasting:
            words.append("for good" if self.lasting == FOR_GOOD else f"for {self.lasting / SECOND:.2f} s")
        return f"{self.at / SECOND:.3f} s: {' '.join(filter(None, words))}"


Happening = RequestDrawn | FaultDrawn

_WEIGHTS = {
    FaultKind.KILL_WORKER: 4,
    FaultKind.KILL_WORKER_AT: 6,
    FaultKind.FREEZE_WORKER: 3,
    FaultKind.FREEZE_WORKER_AT: 7,
    FaultKind.DRAIN_WORKER: 4,
    FaultKind.CUT: 4,
    FaultKind.TWIN_WORKER: 3,
    FaultKind.KILL_STORE: 2,
    FaultKind.FREEZE_STORE: 2,
    FaultKind.CORRUPT_DISK: 3,
    FaultKind.HANG_DISK: 2,
    FaultKind.FLIP_BITS: 2,
    FaultKind.DAMAGE_TRANSFER: 3,
}
_KINDS = [kind for kind in FaultKind for _ in range(_WEIGHTS.get(kind, 1))]
OPENINGS = 4
TOKENS = range(64, 4000)


def draw(seed: int) -> list[Happening]:
    """Return the happenings (requests and faults) that are drawn from a seed, in the order of time."""
    chance = Random(seed)
    drawn: list[Happening] = [_request(chance) for _ in range(chance.randint(6, 14))]
    drawn += [_fault(chance) for _ in range(chance.randint(3, 12))]
    return sorted(drawn, key=lambda each: each.at)


def _request(chance: Random) -> RequestDrawn:
    # The prompt begins with one of `OPENINGS` fixed prefixes, so that prompts share blocks, even those of different seeds.
    opening = Random(chance.randrange(OPENINGS))
    prompt = [opening.choice(TOKENS) for _ in range(opening.choice((16, 48, 96, 160)))]
    prompt += [chance.choice(TOKENS) for _ in range(chance.choice((3, 20, 60, 140)))]
    sampled = chance.random()
    sampling = Sampling(temperature=0.0, max_tokens=chance.randint(1, 40), ignore_eos=True)
    # Some workers can continue an answer with a penalty, but no worker can continue one with a seed (next branch).
    if sampled < 0.15:
        sampling = structs.replace(sampling, frequency_penalty=2.0)
    elif sampled < 0.35:
        sampling = structs.replace(sampling, temperature=0.75, seed=chance.randrange(1 << 20))
    return RequestDrawn(
        at=_between(chance, *ARRIVALS),
        prompt=b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in prompt),
        sampling=sampling,
        placement=chance.choice((Placement.AUTO, Placement.AUTO, Placement.AGGREGATED, Placement.DISAGGREGATED)),
        kv_path=chance.choice((None, KvPath.STORE, KvPath.DIRECT)),
        whole=chance.random() < 0.35,
        deadline=_span(chance, 0.3, 6) if chance.random() < 0.2 else None,
        leaves_after=_span(chance, 0.002, 1.5) if chance.random() < 0.3 else None,
        session=f"s{chance.randrange(3)}" if chance.random() < 0.3 else "",
    )


def _fault(chance: Random) -> FaultDrawn:
    kind = chance.choice(_KINDS)
    worker = chance.choice(list(WORKERS))
    target, other = worker, ""
    lasting, amount = _span(chance, 0.2, 3), chance.choice((1, 2, 8))
    match kind:
        case FaultKind.FREEZE_WORKER:
            lasting = chance.choice((_span(chance, 0.3, 1.5), _span(chance, 3, 7), FOR_GOOD))
        case FaultKind.KILL_WORKER_AT:
            other = chance.choice((*STAGES, "lend", "pull"))
        case FaultKind.FREEZE_WORKER_AT:
            # the freeze lasts longer than the leases of handoffs and of the store, so that these end during the freeze
            other = chance.choice(("lend", "write", "pull", "pull", "read", "read", "read"))
            lasting = _span(chance, 0.6, 1.5)
        case FaultKind.DRAIN_WORKER:
            lasting = _span(chance, 0.05, 1.5)
        case FaultKind.TWIN_WORKER:
            # "router": the worker is also cut off from the router while the other process runs; empty: it is not
            lasting, other = _span(chance, 3, 8), chance.choice(("", "router"))
        case FaultKind.HALF_CLOSE | FaultKind.FILL_BUFFER:
            other = "router"
        case FaultKind.CUT | FaultKind.RESET:
            target, other = chance.choice(
                (
                    (worker, "router"),
                    (worker, "router"),
                    (worker, "store"),
                    ("p0", "d0"),
                    ("p1", "b0"),
                    ("router", "store"),
                )
            )
            lasting = chance.choice((_span(chance, 0.1, 1), _span(chance, 2, 6)))
        case FaultKind.SLOW:
            target, amount = chance.choice((worker, "router", "store")), chance.choice((10, 50, 200))
        case FaultKind.KILL_ROUTER | FaultKind.FREEZE_ROUTER:
            target, lasting = "router", _span(chance, 0.1, 4)
        case FaultKind.REGISTRY_AWAY:
            target, lasting = "router", _span(chance, 2, 8)
        case FaultKind.KILL_STORE | FaultKind.FREEZE_STORE:
            target = "store"
        case (
            FaultKind.FAIL_DISK
            | FaultKind.HANG_DISK
            | FaultKind.FULL_DISK
            | FaultKind.CORRUPT_DISK
            | FaultKind.FLIP_BITS
        ):
            target, lasting = "store", _span(chance, 1, 7)
        case _:
            pass
    if kind not in _COUNTED:
        amount = 0
    if kind in _INSTANT:
        lasting = Nanos(0)
    return FaultDrawn(
        at=_between(chance, *FAULTS), kind=kind, target=target, other=other, lasting=lasting, amount=amount
    )


_COUNTED = {
    FaultKind.FAIL_ENGINE, FaultKind.SPOIL, FaultKind.SKIP, FaultKind.DAMAGE_TRANSFER, FaultKind.CORRUPT_DISK,
    FaultKind.FLIP_BITS, FaultKind.SLOW,
}  # fmt: skip
_INSTANT = (_COUNTED - {FaultKind.SLOW}) | {
    FaultKind.HANG_ENGINE,
    FaultKind.RESET,
    FaultKind.HALF_CLOSE,
    FaultKind.FILL_BUFFER,
    FaultKind.KILL_WORKER,
    FaultKind.KILL_WORKER_AT,
}


def _between(chance: Random, first: Nanos, last: Nanos) -> Nanos:
    return Nanos(chance.randrange(first, last))


def _span(chance: Random, least: float, most: float) -> Nanos:
    return Nanos(round(chance.uniform(least, most) * SECOND))


def part(schedule: Sequence[Happening], keep: Sequence[int] | None) -> list[Happening]:
    """Return the happenings whose indices are in `keep`, or all happenings if `keep` is None.

    Raises:
        IndexError: An index in `keep` is too large.
    """
    return list(schedule) if keep is None else [schedule[index] for index in keep]
