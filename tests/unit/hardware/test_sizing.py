"""Sizing: known results for a table of demands, and properties that hold for every request."""

from math import ceil, inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.core.roles import Role
from fleet.hardware import sizing
from fleet.hardware.gpus import gpu
from fleet.hardware.known_models import SizedModel, model_by_repository, model_from_config
from fleet.hardware.latency.open_loop import (
    BatchOccupancy,
    EngineReplica,
    RequestShape,
    aggregated_rate,
    aggregated_tpot,
    aggregated_ttft,
    decode_rate,
    decode_tpot,
    highest_concurrency,
    highest_prefill_rate,
    prefill_ttft,
)
from fleet.hardware.latency.prediction import BUDGET_TOKENS, transfer_seconds
from fleet.hardware.sizing import HEADROOM, Demand, GpuSupply, LatencyGoals, Shortfall, Sizing, SizingGoal, size
from tests.support.sim.model_configs import LLAMA_70B

FP8 = "nvidia/Llama-3.3-70B-Instruct-FP8"


def sized(repository=FP8) -> SizedModel:
    found = model_by_repository(repository)
    assert found is not None
    return found


def a_demand(rate=10.0, prompt=2048, answer=256, hit=0.0, clients=0.0):
    request = RequestShape(prompt_tokens=prompt, answer_tokens=answer, cached_tokens=hit * prompt)
    return Demand(request=request, rate=rate, clients=clients)


def found(demand, ttft=1.0, tpot=0.05, on="h100", gpus=4096, per_node=8, model=FP8, percentile=0.9):
    goals = LatencyGoals(ttft=ttft, tpot=tpot, percentile=percentile)
    return size(sized(model), demand, goals, GpuSupply(gpu=gpu(on), gpus=gpus, per_node=per_node))


def replicas(answer):
    return {pool.role: pool.replicas for pool in answer.pools}


def limit_by_looking(answer, demand, ttft, tpot, role, percentile=0.9):
    """Return the highest rate of one engine, found by trying two thousand loads one by one."""
    request, occupancy = demand.request, BatchOccupancy(percentile=percentile, waiting_clients=False)
    engine = EngineReplica(
        step=answer.estimate.step,
        client=answer.estimate.client,
        capacity_tokens=answer.placement.kv_capacity_tokens(),
        most_running=256,
        budget_tokens=BUDGET_TOKENS,
    )
    room = highest_concurrency(engine, request)
    loads = [room * number / 2000 for number in range(1, 2001)]
    if role is Role.PREFILL:
        most = HEADROOM * highest_prefill_rate(engine, request)
        rates = [most * number / 2000 for number in range(1, 2001)]
        return max(rate for rate in rates if prefill_ttft(engine, request, occupancy, rate) <= ttft)
    transfer = transfer_seconds(answer.placement, answer.placement, ceil(request.prompt_tokens))
    if role is Role.DECODE:
        kept = [load for load in loads if decode_tpot(engine, request, occupancy, load, transfer) <= tpot]
        of = decode_rate
    else:
        kept = [
            load
            for load in loads
            if aggregated_tpot(engine, request, occupancy, load) <= tpot
            and aggregated_ttft(engine, request, occupancy, load) <= ttft
        ]
        of = aggregated_rate
    fitting = [load for load in kept if occupancy.others(load) + 1 <= room]
    return max(rate for load in fitting if (rate := of(engine, request, load)) <= HEADROOM * of(engine, request, room))


TABLE = [
    # requests per second, prompt, answer, cached share, TTFT, TPOT: pools and sharding
    (0.1, 2048, 256, 0.0, 1.0, 0.050),
    (1, 2048, 256, 0.0, 1.0, 0.050),
    (5, 2048, 256, 0.0, 1.0, 0.050),
    (10, 2048, 256, 0.0, 1.0, 0.050),
    (20, 2048, 256, 0.0, 1.0, 0.050),
    (50, 2048, 256, 0.0, 1.0, 0.050),
    (200, 2048, 256, 0.0, 1.0, 0.050),
    (10, 2048, 256, 0.5, 1.0, 0.050),
    (10, 2048, 256, 0.9, 1.0, 0.050),
    (10, 128, 256, 0.0, 1.0, 0.050),
    (10, 512, 256, 0.0, 1.0, 0.050),
    (10, 8192, 256, 0.0, 2.0, 0.050),
    (10, 8192, 256, 0.8, 2.0, 0.050),
    (2, 32768, 256, 0.0, 8.0, 0.050),
    (10, 2048, 32, 0.0, 1.0, 0.050),
    (10, 2048, 1024, 0.0, 1.0, 0.050),
    (10, 2048, 4096, 0.0, 1.0, 0.050),
    (10, 2048, 256, 0.0, 0.4, 0.050),
    (10, 2048, 256, 0.0, 5.0, 0.200),
    (10, 2048, 256, 0.0, 1.0, 0.030),
    (10, 2048, 256, 0.0, 1.0, 0.020),
    (10, 2048, 256, 0.0, 1.0, 0.015),
    (10, 2048, 256, 0.0, 1.0, 0.011),
    (10, 8192, 512, 0.0, 2.0, 0.015),
    (2, 1024, 8192, 0.0, 20.0, 0.500),
    (2, 8192, 8192, 0.0, 20.0, 0.500),
]


@pytest.mark.parametrize(("rate", "prompt", "answer", "hit", "ttft", "tpot"), TABLE)
def test_replicas_are_rate_divided_by_limit(rate, prompt, answer, hit, ttft, tpot):
    demand = a_demand(rate, prompt, answer, hit)

    got = found(demand, ttft, tpot)

    assert isinstance(got, Sizing)
    for role, number in replicas(got).items():
        limit = limit_by_looking(got, demand, ttft, tpot, role)
        assert ceil(rate / limit * 0.998) <= number <= ceil(rate / limit), (role, rate / limit)
    assert got.ttft <= ttft
    assert got.tpot <= tpot
    assert got.most >= rate


def test_table_has_both_kinds_of_serving_and_shardings():
    answers = [found(a_demand(*row[:4]), *row[4:]) for row in TABLE]

    assert {frozenset(replicas(each)) for each in answers} == {
        frozenset({Role.BOTH}),
        frozenset({Role.PREFILL, Role.DECODE}),
    }
    assert len({each.placement.parallelism.tp for each in answers}) >= 3


loads = st.floats(0.05, 300)
lengths = st.tuples(st.integers(16, 20_000), st.integers(1, 4_000), st.floats(0, 0.95))
first = st.floats(0.05, 20)
each_token = st.floats(0.005, 0.3)


def gpus_of(answer):
    """Return the number of GPUs, or infinity if there is no solution."""
    if isinstance(answer, Sizing):
        return answer.gpus
    return answer.best if answer.goal is SizingGoal.GPUS else inf


@given(load=loads, more=st.floats(1, 20), of=lengths, ttft=first, tpot=each_token, waiting=st.booleans())
@settings(max_examples=30, deadline=None)
def test_more_load_never_gets_fewer_gpus(load, more, of, ttft, tpot, waiting):
    def at(times):
        rate, clients = (0.0, ceil(load) * times) if waiting else (load * times, 0.0)
        return found(a_demand(rate, *of, clients=clients), ttft, tpot)

    less, greater = at(1.0), at(more)

    assert gpus_of(less) <= gpus_of(greater)
    if isinstance(less, Sizing) and isinstance(greater, Sizing):
        same = less.placement.parallelism == greater.placement.parallelism and len(less.pools) == len(greater.pools)
        if same and not waiting:
            assert all(replicas(less)[role] <= number for role, number in replicas(greater).items())


@given(
    load=loads,
    of=lengths,
    ttft=first,
    tpot=each_token,
    looser=st.tuples(*[st.floats(1, 10)] * 2),
    share=st.floats(0.5, 0.95),
)
@settings(max_examples=30, deadline=None)
def test_looser_goals_never_get_more_gpus(load, of, ttft, tpot, looser, share):
    demand = a_demand(load, *of)
    strict = gpus_of(found(demand, ttft, tpot))

    assert gpus_of(found(demand, ttft * looser[0], tpot)) <= strict
    assert gpus_of(found(demand, ttft, tpot * looser[1])) <= strict
    assert gpus_of(found(demand, ttft, tpot, percentile=share * 0.9)) <= strict


@given(load=loads, of=lengths, ttft=first, tpot=each_token, gpus=st.integers(1, 200), clients=st.integers(0, 2000))
@settings(max_examples=30, deadline=None)
def test_solution_keeps_goals_and_shortfall_names_best(load, of, ttft, tpot, gpus, clients):
    demand = a_demand(0.0 if clients else load, *of, clients=clients)

    got = found(demand, ttft, tpot, gpus=gpus)

    if isinstance(got, Sizing):
        assert got.gpus <= gpus
        assert got.ttft <= ttft
        assert got.tpot <= tpot
        assert got.most >= (clients or load) * 0.999
        assert got.placement.parallelism.gpus <= min(8, gpus)
        return
    match got.goal:
        case SizingGoal.GPUS:
            assert got.best > gpus == got.wanted
            assert got.most < (clients or load)
            enough = found(demand, ttft, tpot, gpus=int(got.best))
            assert isinstance(enough, Sizing) or enough.goal is SizingGoal.GPUS
        case SizingGoal.TTFT | SizingGoal.TPOT:
            assert got.best > got.wanted * 0.999
            field = "ttft" if got.goal is SizingGoal.TTFT else "tpot"
            reached = found(demand, **({"ttft": 1e4, "tpot": 1e4} | {field: got.best * 1.02}), gpus=10**6)
            assert isinstance(reached, Sizing) or reached.goal is SizingGoal.GPUS
        case SizingGoal.MEMORY:
            assert got.wanted <= min(8, gpus)


def test_stated_capacity_of_gpus_is_reached():
    demand = a_demand(40.0)
    short = found(demand, gpus=16)
    assert isinstance(short, Shortfall)
    assert short.goal is SizingGoal.GPUS

    assert isinstance(found(a_demand(short.most * 0.999), gpus=16), Sizing)
    assert isinstance(found(a_demand(short.most * 1.01), gpus=16), Shortfall)
    assert isinstance(found(demand, gpus=int(short.best)), Sizing)


def test_model_beyond_a_node_names_needed_gpus():
    got = found(a_demand(1), model="meta-llama/Llama-3.1-405B")

    assert got.goal is SizingGoal.MEMORY
    assert (got.wanted, got.best) == (8, 16)
    assert isinstance(found(a_demand(1), model="meta-llama/Llama-3.1-405B", on="b200", ttft=9), Sizing)


def test_request_beyond_context_is_a_shortfall():
    got = found(a_demand(1, prompt=131_000, answer=100))

    assert (got.goal, got.wanted, got.best) == (SizingGoal.CONTEXT, 131_100, 131_072)


def test_unreachable_goal_names_best_latency():
    got = found(a_demand(1), ttft=0.01)
    assert got.goal is SizingGoal.TTFT
    assert isinstance(found(a_demand(0.01), ttft=got.best * 1.05), Sizing)

    got = found(a_demand(1), tpot=0.001)
    assert got.goal is SizingGoal.TPOT
    assert isinstance(found(a_demand(0.001), tpot=got.best * 1.05), Sizing)


def test_engines_fit_into_their_nodes():
    assert found(a_demand(10), tpot=0.015).placement.parallelism.tp == 8
    small = found(a_demand(10), tpot=0.02, per_node=4)
    assert small.placement.parallelism.tp <= 4


@pytest.mark.parametrize(
    ("model", "on", "most"),
    [
        ("deepseek-ai/DeepSeek-R1", "b200", 8),
        ("openai/gpt-oss-120b", "b200", 8),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "h100", 16),
    ],
)
def test_engines_use_tensor_parallelism_alone(model, on, most):
    ways = [each.parallelism for each in sizing.node_shardings(sized(model), gpu(on), most, 4096)]

    assert ways
    assert all((way.pp, way.dp, way.ep) == (1, 1, 1) for way in ways)


def test_running_requests_are_limited_by_kv():
    """Size an 8B model with answers of 4,000 tokens: on GPUs of 45 GiB, memory is the limit, so larger GPUs need fewer engines."""
    demand = a_demand(2, prompt=8000, answer=4000)
    small = found(demand, on="l40s", ttft=20, tpot=0.3, model="meta-llama/Llama-3.1-8B-Instruct", per_node=1)
    large = found(demand, on="h200", ttft=20, tpot=0.3, model="meta-llama/Llama-3.1-8B-Instruct", per_node=1)
    assert small.gpus > 2 * large.gpus


def test_room_is_left_for_random_bursts():
    """Size engines with room for few requests: random bursts must fit, too, and not only the mean number of requests."""
    demand = a_demand(1, prompt=8192, answer=8192)

    got = found(demand, ttft=60, tpot=2, per_node=2)

    limit = limit_by_looking(got, demand, 60, 2, Role.BOTH)
    assert replicas(got) == {Role.BOTH: ceil(1 / limit)}
    fluctuating = BatchOccupancy(percentile=0.9, waiting_clients=False)
    room = got.placement.kv_capacity_tokens() / 16384
    assert room < 20
    assert fluctuating.others(0.8 * room) > room, "on average it would fit"


def test_solution_names_basis_of_its_estimate():
    bases = [
        found(a_demand(1)).estimate.basis.value,
        found(a_demand(1), model="meta-llama/Llama-3.3-70B-Instruct").estimate.basis.value,
        found(a_demand(1), on="a100").estimate.basis.value,
    ]
    assert bases == ["model", "gpu", "engine"]


def test_config_replaces_unknown_repository():
    config = LLAMA_70B | {"max_position_embeddings": 8192}
    goals, supply = LatencyGoals(ttft=1.0, tpot=0.05, percentile=0.9), GpuSupply(gpu=gpu("h100"), gpus=64, per_node=8)
    by_name = size(sized("meta-llama/Llama-3.3-70B-Instruct"), a_demand(), goals, supply)

    got = size(model_from_config(config), a_demand(), goals, supply)

    assert isinstance(got, Sizing)
    assert msgspec.structs.replace(got, placement=by_name.placement) == by_name
