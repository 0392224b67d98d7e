"""Builders of requests, workers and messages with valid defaults, so that a test shows only the fields that matter."""

from collections.abc import Iterable, Sequence

from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import (
    Finish,
    GenerateRequest,
    KvOrigin,
    KvReport,
    Logprobs,
    Prompt,
    Sampling,
    Source,
    TextPrompt,
    TokenBytes,
)
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import Handoff, LoadReport, ParsedDelta, Progress, Start, WorkerDescription
from fleet.router.messages import Arrived, WorkerJoined
from kvstore.block import blocks_for
from kvstore.layouts.fingerprint import Fingerprint
from kvstore.protocol.versions import ProtocolRange

MODEL = ModelName("tiny")
STORE = StoreId("store-1")
FINGERPRINT = "f" * 32
BLOCK_TOKENS = 32


def token_bytes(ids: Iterable[int]) -> TokenBytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in ids)


def token_ids(tokens: TokenBytes) -> list[int]:
    return [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]


def a_prompt(num_tokens: int = 10, *, first: int = 1) -> TokenBytes:
    """Return `num_tokens` consecutive ids from `first` on; prompts with different `first` have no block in common."""
    return token_bytes(range(first, first + num_tokens))


def a_request(
    *,
    id: str = "r1",  # noqa: A002 - the name of the field
    model: ModelName = MODEL,
    prompt: Prompt = TextPrompt("once upon a time"),  # noqa: B008 - immutable
    **fields: object,
) -> GenerateRequest:
    return GenerateRequest(id=RequestId(id), model=model, prompt=prompt, **fields)  # type: ignore[arg-type]


def an_arrival(
    *,
    request_id: str = "r1",
    model: ModelName = MODEL,
    tokens: TokenBytes | int = 10,
    sampling: Sampling = Sampling(temperature=0.0),  # noqa: B008 - immutable
    **fields: object,
) -> Arrived:
    """Build an arrival; `tokens` is a prompt or the length of one."""
    if isinstance(tokens, int):
        tokens = a_prompt(tokens)
    return Arrived(request_id=RequestId(request_id), model=model, tokens=tokens, sampling=sampling, **fields)  # type: ignore[arg-type]


def a_description(
    *,
    worker_id: str = "w1",
    incarnation: str = "1",
    role: Role = Role.DECODE,
    block_tokens: int = BLOCK_TOKENS,
    max_model_len: int = 4096,
    kv_blocks: int = 1024,
    max_running: int = 16,
    fingerprint: str = FINGERPRINT,
    kv_paths: Sequence[KvPath] = (KvPath.STORE,),
    store_id: StoreId | None = STORE,
    model: ModelName = MODEL,
    engine: str = "simulated 1",
    kv: Fingerprint | None = None,
    keeps_forms: bool = False,
    continued_fields: Sequence[str] = (),
    sampling_fields: Sequence[str] = (),
    protocols: ProtocolRange | None = None,
    keeps_answers: bool = False,
) -> WorkerDescription:
    return WorkerDescription(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        model=model,
        role=role,
        block_tokens=block_tokens,
        max_model_len=max_model_len,
        kv_blocks=kv_blocks,
        max_running=max_running,
        fingerprint=fingerprint,
        kv_paths=tuple(kv_paths),
        store_id=store_id,
        engine=engine,
        kv=kv,
        keeps_forms=keeps_forms,
        continued_fields=tuple(continued_fields),
        sampling_fields=tuple(sampling_fields),
        protocols=protocols,
        keeps_answers=keeps_answers,
    )


def a_joined_worker(worker_id: str = "w1", role: Role = Role.DECODE, **fields: object) -> WorkerJoined:
    return WorkerJoined(
        description=a_description(worker_id=worker_id, role=role, **fields),  # type: ignore[arg-type]
        address=f"unix:/run/{worker_id}",
    )


def a_start(
    *,
    request_id: str = "r1#1",
    phase: Phase = Phase.AGGREGATED,
    tokens: TokenBytes | int = 10,
    sampling: Sampling = Sampling(temperature=0.0),  # noqa: B008 - immutable
    **fields: object,
) -> Start:
    if isinstance(tokens, int):
        tokens = a_prompt(tokens)
    return Start(request_id=RequestId(request_id), phase=phase, tokens=tokens, sampling=sampling, **fields)  # type: ignore[arg-type]


def a_handoff(
    *,
    kv_path: KvPath = KvPath.STORE,
    prefill_worker: str = "p1",
    fingerprint: str = FINGERPRINT,
    num_tokens: int = 10,
    params: bytes = b"{}",
    kv: Fingerprint | None = None,
) -> Handoff:
    return Handoff(
        kv_path=kv_path,
        prefill_worker=WorkerId(prefill_worker),
        fingerprint=fingerprint,
        num_tokens=num_tokens,
        params=params,
        kv=kv,
    )


def a_kv_report(num_tokens: int = 10, *, cached_blocks: int = 0, source: Source = Source.ENGINE) -> KvReport:
    """Build the KV report of a prompt, `cached_blocks` of whose blocks came from `source`."""
    blocks = blocks_for(num_tokens, BLOCK_TOKENS)
    origins = [KvOrigin(source=Source.COMPUTED, blocks=blocks - cached_blocks)]
    if cached_blocks:
        moved = 0 if source is Source.ENGINE else cached_blocks * 1024
        origins.insert(0, KvOrigin(source=source, blocks=cached_blocks, bytes=moved))
    return KvReport(prompt_blocks=blocks, origins=tuple(origins), cached_tokens=cached_blocks * BLOCK_TOKENS)


def some_progress(
    *token_ids: int,
    request_id: str = "r1#1",
    finish: Finish | None = None,
    kv: KvReport | None = None,
    handoff: Handoff | None = None,
    logprobs: Sequence[Logprobs] = (),
    parsed: ParsedDelta | None = None,
) -> Progress:
    return Progress(
        request_id=RequestId(request_id),
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        finish=finish,
        kv=kv,
        handoff=handoff,
        parsed=parsed,
    )


def a_load(*, running: int = 0, waiting: int = 0, kv_blocks_used: int = 0, **fields) -> LoadReport:
    return LoadReport(running=running, waiting=waiting, kv_blocks_used=kv_blocks_used, **fields)
