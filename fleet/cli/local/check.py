"""`fleet up --check`: compares the tokens of each KV path with the tokens of one engine, and proves that blocks moved.

Rules:

1. The reference is one engine that does everything, without a store and without a KV connector.
2. Then a cluster of one prefill and one decode worker is started for each KV path, and every prompt is disaggregated.
   The cluster gets the same prompts as the reference, eight at a time. Decoding is greedy, so all tokens must be the
   same.
3. Equal tokens alone do not prove that blocks moved, because an engine that cannot fetch a block computes it. So the KV
   report of each prompt must show that its decode phase fetched blocks, unless the decode engine had all of them
   already.
"""

import asyncio
import importlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct, structs

from fleet.cli.local.cluster import LocalCluster, LocalClusterOptions, cluster_client, say, with_cluster
from fleet.client import AsyncClient, FleetError
from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import TOKEN_BYTES, KvOrigin, KvPhase, Source, TokenBytes
from fleet.core.roles import KvPath, Phase, Placement, Role
from fleet.core.system_clock import SystemClock
from fleet.frontend.text.codec import load_codec
from fleet.local.processes import ClusterFailed
from fleet.local.settings import PoolSection, StorePlace, Topology
from fleet.router.settings.router import AccessRecordSettings
from workers.settings import SimulatedSettings

LONGEST = 3000  # maximum number of tokens of a prompt of the check
SHARED = 512  # maximum number of equal tokens at the beginning of the last `_SHARING` prompts
FEWEST = 20  # minimum number of prompts of the check
_LENGTHS = (40, 48, 63, 64, 65, 96, 128, 200, 333, 777, 1024, 1500, 2049)
_LONG = 2
_SHARING = 6

ANSWER_TOKENS = 56
AT_A_TIME = 8
WITHIN = {  # time limit of one prompt, while seven other prompts run at the same time
    KvPath.STORE: Nanos(180 * SECOND),
    KvPath.DIRECT: Nanos(600 * SECOND),  # long, because a NIXL transfer can stall for half a minute on CPUs
}
# heartbeat timeout of the router; it is long, because the busy threads of two engines with NIXL can take all CPU time of a small machine
SILENCE_SECONDS = 60.0
# Value of the router's setting `max_queue_seconds`. It is long, because a router predicts long waits after a stalled transfer.
QUEUE_SECONDS = 600.0
MOVED_BY = {KvPath.STORE: Source.STORE, KvPath.DIRECT: Source.DIRECT}


class Interrupted(ClusterFailed):
    """Error: the check was stopped before it had a result."""

    def __init__(self) -> None:
        super().__init__("interrupted")


class CheckedCompletion(Struct, frozen=True, kw_only=True):
    """The answer to one prompt: its tokens, times and KV report."""

    tokens: tuple[int, ...]
    kv: tuple[KvPhase, ...]
    ttft: Nanos
    rest: Nanos  # time from the first token of the answer to the last one


class CheckVerdict(Struct, frozen=True, kw_only=True):
    """The verdict for one KV path, printed as a line of JSON."""

    ok: bool
    prompts: int
    identical: int
    blocks_moved: int
    bytes_moved: int
    path: KvPath
    ttft_ms: float  # median over the answered prompts; 0 if there are none
    tpot_ms: float  # median over the answered prompts; 0 if there are none


async def check(
    topology: Topology, surroundings: LocalClusterOptions, paths: Sequence[KvPath], api_key: str = ""
) -> bool:
    """Check each KV path and print a line of JSON for each; return True if all paths are good.

    Args:
        topology: The model, the engine and its settings; the check sets pools and KV paths itself.
        surroundings: Folders of the clusters; each cluster has its own folder for logs.
        paths: The paths to check, in this order.
        api_key: The key of a tenant; empty: the clusters take requests without one.

    Raises:
        ConfigurationRefused: The topology cannot be used, or its limit of tokens is so short that no block would have to move.
        ClusterFailed: The reference could not be computed.
        Interrupted: A stop was requested.
    """
    shortest = topology.cluster.block_tokens + 1 + ANSWER_TOKENS
    if topology.cluster.max_model_len < shortest:
        raise ConfigurationRefused(
            f"cluster.max_model_len: --check needs at least {shortest}: one block, one token, and {ANSWER_TOKENS} of an answer"
        )
    length = min(topology.cluster.max_model_len, LONGEST + ANSWER_TOKENS)
    expected: list[CheckedCompletion] = []
    prompts: list[TokenBytes] = []
    block_tokens = 0

    async def compute_reference(cluster: LocalCluster) -> None:
        nonlocal block_tokens
        prompts.extend(reference_prompts(cluster.plan.model_dir, max_tokens=length - ANSWER_TOKENS))
        say(f"asking one aggregated engine {len(prompts)} prompts")
        answers, block_tokens = await _ask_all(cluster, prompts, Placement.AGGREGATED, WITHIN[KvPath.STORE], api_key)
        if missing := answers.count(None):
            raise ClusterFailed(f"the reference engine did not answer {missing} of {len(prompts)} prompts")
        expected.extend(answer for answer in answers if answer is not None)

    if not await with_cluster(_reference(topology), _subfolder(surroundings, "reference"), compute_reference):
        raise Interrupted
    good = True
    for path in paths:
        verdict = await _check_path(topology, surroundings, path, prompts, block_tokens, expected, api_key)
        print(msgspec.json.encode(verdict).decode(), flush=True)
        good = good and verdict.ok
    return good


async def _check_path(
    topology: Topology,
    surroundings: LocalClusterOptions,
    path: KvPath,
    prompts: Sequence[TokenBytes],
    block_tokens: int,
    expected: Sequence[CheckedCompletion],
    api_key: str,
) -> CheckVerdict:
    """Check one KV path in a cluster of its own.

    If the cluster fails, return a verdict with `ok` false, so that the caller can check the next path.
    """
    got: list[CheckedCompletion | None] = []

    async def compare(cluster: LocalCluster) -> None:
        say(f"asking a prefill and a decode worker the same, blocks by {path}")
        answers, _ = await _ask_all(cluster, prompts, Placement.DISAGGREGATED, WITHIN[path], api_key)
        got.extend(answers)

    try:
        if not await with_cluster(disaggregated(topology, path), _subfolder(surroundings, path), compare):
            raise Interrupted
    except Interrupted:
        raise
    except ClusterFailed as error:
        say(f"{path}: {error}")
    got = got or [None] * len(prompts)
    complaints = []
    for index, (prompt, reference, answer) in enumerate(zip(prompts, expected, got, strict=True)):
        tokens = len(prompt) // TOKEN_BYTES
        if (wrong := complaint(path, tokens, block_tokens, reference, answer)) is not None:
            complaints.append(wrong)
            say(f"prompt {index} of {tokens} tokens: {wrong}")
    return judge(path, expected, got, complaints)


async def _ask_all(
    cluster: LocalCluster, prompts: Sequence[TokenBytes], placement: Placement, within: Nanos, api_key: str
) -> tuple[list[CheckedCompletion | None], int]:
    """Send all prompts. Return the answers in the order of the prompts (None for failed requests), and the tokens per block."""
    answers: list[CheckedCompletion | None] = [None] * len(prompts)
    turn = asyncio.Semaphore(AT_A_TIME)
    async with cluster_client(cluster.plan, api_key) as client:

        async def ask(index: int) -> None:
            async with turn:
                try:
                    answers[index] = await _ask(client, prompts[index], placement, within, SystemClock())
                except FleetError as error:
                    say(f"prompt {index} of {len(prompts[index]) // TOKEN_BYTES} tokens: {error.message}")

        (card,) = await client.models()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(prompts)):
                tasks.create_task(ask(index))
    return answers, card.block_tokens


async def _ask(
    client: AsyncClient, prompt: TokenBytes, placement: Placement, within: Nanos, clock: Clock
) -> CheckedCompletion:
    begun = clock.now()
    first = last = begun
    async with client.generate(
        np.frombuffer(prompt, "<u4").tolist(),
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        ignore_eos=True,
        placement=placement,
        timeout_seconds=within / SECOND,
    ) as stream:
        async for delta in stream:
            if delta.token_ids:
                last = clock.now()
                first = last if first == begun else first
    result = stream.result
    return CheckedCompletion(tokens=result.token_ids, kv=result.kv, ttft=Nanos(first - begun), rest=Nanos(last - first))


def judge(
    path: KvPath,
    expected: Sequence[CheckedCompletion],
    got: Sequence[CheckedCompletion | None],
    complaints: Sequence[str],
) -> CheckVerdict:
    """Return the verdict for one KV path.

    Args:
        path: The KV path.
        expected: The answers of the reference, in the order of the prompts.
        got: The answers through this path, in the same order; None: the request has failed.
        complaints: Texts that say what was wrong; the path is good if there are none.
    """
    answers = [answer for answer in got if answer is not None]
    origins = [origin for answer in answers for origin in _decode_origins(answer) if origin.source is MOVED_BY[path]]
    return CheckVerdict(
        ok=not complaints,
        prompts=len(expected),
        identical=sum(
            answer is not None and answer.tokens == reference.tokens
            for answer, reference in zip(got, expected, strict=True)
        ),
        blocks_moved=sum(origin.blocks for origin in origins),
        bytes_moved=sum(origin.bytes for origin in origins),
        path=path,
        ttft_ms=_median(answer.ttft / MILLISECOND for answer in answers),
        tpot_ms=_median(
            answer.rest / MILLISECOND / (len(answer.tokens) - 1) for answer in answers if len(answer.tokens) > 1
        ),
    )


def complaint(
    path: KvPath, prompt_tokens: int, block_tokens: int, expected: CheckedCompletion, answer: CheckedCompletion | None
) -> str | None:
    """Return a text that says what is wrong with an answer, or None if the answer is right."""
    if answer is None:
        return "no answer"
    if answer.tokens != expected.tokens:
        pairs = enumerate(zip(answer.tokens, expected.tokens, strict=False))
        differing = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        return "another number of tokens" if differing is None else f"token {differing} differs"
    if not blocks_received(answer, path, prompt_tokens, block_tokens):
        origins = ", ".join(f"{origin.blocks} {origin.source}" for origin in _decode_origins(answer) if origin.blocks)
        return f"no block moved by {path}; of the decode phase's blocks were {origins or 'none'}"
    return None


def blocks_received(answer: CheckedCompletion, path: KvPath, prompt_tokens: int, block_tokens: int) -> bool:
    """Return True if blocks moved to the decode phase by `path`, or if the decode engine had all blocks already.

    The block of a prompt's last token does not count, because a decode engine always computes this token: the result is
    the first token of the answer.
    """
    full_blocks = (prompt_tokens - 1) // block_tokens
    origins = _decode_origins(answer)
    held = sum(origin.blocks for origin in origins if origin.source is Source.ENGINE)
    return held >= full_blocks or any(
        origin.blocks and origin.bytes for origin in origins if origin.source is MOVED_BY[path]
    )


def _decode_origins(answer: CheckedCompletion) -> list[KvOrigin]:
    return [origin for phase in answer.kv if phase.phase is Phase.DECODE for origin in phase.report.origins]


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return round(statistics.median(known), 3) if known else 0.0


def _reference(topology: Topology) -> Topology:
    """Return a topology with one engine that computes prompts and answers, with the settings of the given topology's decode workers."""
    worker = structs.replace(_pool(topology, Role.DECODE), role=Role.BOTH)
    return structs.replace(
        _beside_others(topology), cluster=structs.replace(topology.cluster, kv_paths=()), pools=(worker,), planner=None
    )


def disaggregated(topology: Topology, path: KvPath) -> Topology:
    """Return a topology with one prefill and one decode worker, which hand blocks over by one KV path."""
    pools = (_pool(topology, Role.PREFILL), _pool(topology, Role.DECODE))
    return structs.replace(
        _beside_others(topology),
        cluster=structs.replace(topology.cluster, kv_paths=(path,)),
        pools=pools,
        planner=None,
    )


def _subfolder(surroundings: LocalClusterOptions, name: str) -> LocalClusterOptions:
    return structs.replace(surroundings, logs=surroundings.logs / name if surroundings.logs else None)


def _beside_others(topology: Topology) -> Topology:
    """Return the topology so that it can run beside the cluster that the same file describes, and with long time limits.

    It has no fixed ports, no peer routers, no backing tiers and no hosted endpoints, and its router writes no files. So it
    neither needs what another cluster holds nor changes its files. The store runs in its own process, because a store in a worker's process is for a single worker only.
    """
    router = structs.replace(
        topology.router,
        http_listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        health_listen="",
        control_listen="",
        kserve_listen="",
        endpoint_picker=None,
        replicas_listen="",
        replicas=(),
        replicas_name="",
        overflow={},
        access_records=AccessRecordSettings(),
        record="",
        heartbeat_timeout_seconds=SILENCE_SECONDS,
        max_queue_seconds=QUEUE_SECONDS,
    )
    store = structs.replace(topology.store, place=StorePlace.PROCESS, tiers=(), metrics_listen="")
    return structs.replace(topology, router=router, store=store)


def _pool(topology: Topology, role: Role) -> PoolSection:
    """Return the settings of a pool of this role, with one worker and without fixed ports."""
    pool = next((pool for pool in topology.pools if pool.role is role), PoolSection(role=role))
    simulated = structs.replace(pool.simulated, direct_listen=SimulatedSettings().direct_listen)
    return structs.replace(pool, replicas=1, metrics_listen="", simulated=simulated)


def reference_prompts(model_dir: Path, *, max_tokens: int) -> list[TokenBytes]:
    """Return token ids of at least `FEWEST` prompts, none longer than `max_tokens`, which must be at least 2.

    The prompts are cut from texts that are shipped with Python, so machines with the same Python have the same prompts.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    codec = load_codec(model_dir)
    text = codec.encode("\n".join(topics[name] for name in sorted(topics)))
    prompts = list(_cut(text, max_tokens))
    prompts.append(prompts[-1])  # one prompt is repeated, to see a cache hit
    assert len(prompts) >= FEWEST
    return prompts


def _cut(text: TokenBytes, max_tokens: int) -> Iterator[TokenBytes]:
    """Yield prompts made of consecutive pieces of the text.

    The last `_SHARING` prompts begin with the same piece. Apart from this piece, no part of the text is in two prompts.
    """
    position = 0

    def take(tokens: int) -> TokenBytes:
        nonlocal position
        piece = text[position * TOKEN_BYTES : (position + tokens) * TOKEN_BYTES]
        position += tokens
        assert len(piece) == tokens * TOKEN_BYTES, "the text is too short"
        return piece

    for length in (*_LENGTHS, *[LONGEST] * _LONG):
        yield take(min(length, max_tokens))
    shared = take(min(SHARED, max_tokens // 2))
    for sharing in range(_SHARING):
        yield shared + take(min(40 + 16 * sharing, max_tokens - len(shared) // TOKEN_BYTES))
