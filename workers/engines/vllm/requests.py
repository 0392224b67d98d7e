"""Translation between an attempt and vLLM: sampling parameters, handoffs as transfer parameters, outputs and KV reports."""

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
import numpy as np

from fleet.core.ids import WorkerId
from fleet.core.requests import (
    TOKEN_BYTES,
    AnyObject,
    Choice,
    Finish,
    Grammar,
    JsonSchema,
    KvOrigin,
    KvReport,
    Logprobs,
    Pattern,
    Sampling,
    Source,
    StructuralTag,
    StructuredOutput,
    ToolCallForm,
    state_fields,
)
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Handoff, Start
from kvstore.block import blocks_for
from workers.engines.vllm.store_planner import COUNTS, HANDOFF, PromptBlockCounts
from workers.ports import EngineFacts

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.metrics.stats import PrefillStats

    from workers.engines.vllm.answer_parser import VllmAnswerParser

log = logging.getLogger(__name__)

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.CANCELLED}
"""Values of `Finish` by vLLM's finish reasons; any other reason is an error of the engine."""

GENERATED = "fleet_generated_tokens"
"""Key of the tokens of an answer that another engine has begun, in vLLM's `SamplingParams.extra_args`
(`workers.engines.vllm.continuation`)."""

ASK_TO_HAND_OFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Transfer parameters by which NIXL's connector keeps a request's blocks for a decode engine."""


def token_ids(start: Start) -> list[int]:
    ids: list[int] = np.frombuffer(start.tokens, dtype="<u4").tolist()
    return ids


def replayed_tokens(start: Start) -> int:
    """Return how many of the attempt's last tokens vLLM has to treat as generated; 0: all may be a part of the prompt."""
    return start.generated_tokens if state_fields(start.sampling) else 0


def fetches(start: Start) -> bool:
    """Return whether the request's blocks come from another engine."""
    return start.handoff is not None and start.handoff.kv_path is KvPath.DIRECT


def transfer_params(start: Start) -> dict[str, Any]:
    """Return the parameters of this request for the connectors."""
    if start.phase is Phase.PREFILL:
        return dict(ASK_TO_HAND_OFF) if start.kv_path is KvPath.DIRECT else {HANDOFF: True}
    if start.handoff is None or start.handoff.kv_path is not KvPath.DIRECT:
        return {}
    params = _pull_params(start.handoff, len(start.tokens) // TOKEN_BYTES)
    if params is None:
        log.warning("handoff unusable, computing its blocks", extra={"request": start.request_id})
        return {}
    return params


def _pull_params(handoff: Handoff, num_tokens: int) -> dict[str, Any] | None:
    """Return the parameters that a prefill engine's NIXL connector gave out; None if the handoff has none.

    The decode engine pulls the blocks of its whole prompt, so both sides must have the same number of tokens.
    """
    try:
        params = json.loads(handoff.params)
    except ValueError:
        return None
    if not isinstance(params, dict) or not params.get("do_remote_prefill") or handoff.num_tokens != num_tokens:
        return None
    return params


def sampling_params(
    start: Start, transfer: dict[str, Any], parser: "VllmAnswerParser | None" = None
) -> "SamplingParams":
    """Convert sampling parameters to vLLM's.

    Args:
        start: The attempt.
        transfer: Parameters for the connectors.
        parser: The parser of the answer, which decides about structured output; None: the answer is not parsed.

    Raises:
        ValueError: vLLM refuses a value.
    """
    from vllm import SamplingParams  # noqa: PLC0415 - slow to import
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    sampling: Sampling = start.sampling
    prefill_only = start.phase is Phase.PREFILL
    if parser is not None:
        form = parser.structured_outputs
    else:
        form = None if sampling.form is None else structured_outputs(sampling.form)
    replayed = replayed_tokens(start)
    extra_args: dict[str, Any] = {"kv_transfer_params": transfer} if transfer else {}
    if replayed:
        extra_args[GENERATED] = token_ids(start)[-replayed:]
    params = SamplingParams(
        max_tokens=1 if prefill_only else sampling.max_tokens + replayed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=min(sampling.min_tokens, 1)
        if prefill_only
        else sampling.min_tokens and sampling.min_tokens + replayed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        structured_outputs=form,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args or None,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    if sampling.bad_tokens:  # set afterwards, because vLLM's public parameter takes words, which it tokenizes itself
        params._bad_words_token_ids = [list(ids) for ids in sampling.bad_tokens]  # noqa: SLF001 - vLLM has no public field for token ids
    return params


def structured_outputs(form: StructuredOutput) -> "StructuredOutputsParams":
    """Convert a structured output to vLLM's."""
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415 - slow to import

    match form:
        case AnyObject():
            return StructuredOutputsParams(json_object=True)
        case JsonSchema(schema=schema):
            return StructuredOutputsParams(json=schema)
        case Pattern(regex=regex):
            return StructuredOutputsParams(regex=regex)
        case Grammar(text=text):
            return StructuredOutputsParams(grammar=text)
        case Choice(strings=strings):
            return StructuredOutputsParams(choice=list(strings))
        case StructuralTag(text=text):
            return StructuredOutputsParams(structural_tag=text)
        case ToolCallForm():
            raise ValueError("tool calls in a form need a parser, which this worker does not have")
        case _:
            assert_never(form)


def logprobs_of(output: "CompletionOutput", wanted: int | None) -> tuple[Logprobs, ...]:
    """Return log probabilities for each token in `output`: of the chosen token and of at most `wanted` alternatives."""
    if wanted is None or output.logprobs is None:
        return ()
    return tuple(
        _ranked(candidates, token, wanted) for token, candidates in zip(output.token_ids, output.logprobs, strict=True)
    )


def prompt_logprobs_of(output: "RequestOutput", start: Start) -> tuple[Logprobs, ...]:
    """Return for each prompt token except the first its log probability and those of the alternatives.

    vLLM sends them only once, with the first output; later outputs have an empty list.
    """
    if not output.prompt_logprobs or start.sampling.prompt_logprobs is None:
        return ()
    wanted = start.sampling.prompt_logprobs
    result = []
    for token, candidates in zip(token_ids(start)[1:], output.prompt_logprobs[1:], strict=True):
        assert candidates is not None
        result.append(_ranked(candidates, token, wanted))
    return tuple(result)


def _ranked(candidates: "Mapping[int, Logprob]", token: int, wanted: int) -> Logprobs:
    ranked = sorted(candidates.items(), key=lambda item: item[1].rank or 0)[:wanted]
    return Logprobs(
        chosen=candidates[token].logprob,
        top_ids=tuple(token_id for token_id, _ in ranked),
        top=tuple(candidate.logprob for _, candidate in ranked),
    )


def counts_at_end(output: "RequestOutput") -> PromptBlockCounts:
    """Return where the prompt's blocks came from, as the connector counted them."""
    params = output.kv_transfer_params or {}
    return msgspec.convert(
        params.get(COUNTS, []), PromptBlockCounts
    )  # no counts exist for requests that the connector does not support


def counts_at_start(start: Start, stats: "PrefillStats", block_tokens: int) -> PromptBlockCounts:
    """Return the counts of `counts_at_end` from vLLM's statistics at the first token.

    Fleet's connector has already subtracted the blocks that did not arrive. vLLM does not say which connector gave the
    blocks. Therefore Fleet's connector counts only pulled blocks as external. All other cached blocks came from the store,
    also if a pull has failed before.
    """
    local = stats.num_local_cached_tokens // block_tokens
    # Rounded up, because the last pulled block may be partly filled.
    elsewhere = blocks_for(stats.num_cached_tokens, block_tokens) - local
    pulls = start.handoff is not None and start.handoff.kv_path is KvPath.DIRECT
    direct = min(blocks_for(stats.num_external_cached_tokens, block_tokens), elsewhere) if pulls else 0
    return PromptBlockCounts(engine=local, store=elsewhere - direct, direct=direct)


def report_of(start: Start, counts: PromptBlockCounts, facts: EngineFacts, block_bytes: int) -> KvReport:
    num_tokens = len(start.tokens) // TOKEN_BYTES
    prompt_blocks = blocks_for(num_tokens, facts.block_tokens)
    known = counts.engine + counts.store + counts.direct
    origins = [
        KvOrigin(source=Source.ENGINE, blocks=counts.engine),
        *(
            KvOrigin(
                source=Source.STORE, origin=facts.store_id or "", blocks=blocks, bytes=blocks * block_bytes, tier=tier
            )
            for tier, blocks in (counts.tiers or {"": counts.store}).items()
        ),
        KvOrigin(
            source=Source.DIRECT,
            origin=start.handoff.prefill_worker if start.handoff else "",
            blocks=counts.direct,
            bytes=counts.direct * block_bytes,
        ),
        KvOrigin(source=Source.COMPUTED, blocks=prompt_blocks - known),
    ]
    return KvReport(
        prompt_blocks=prompt_blocks,
        origins=tuple(origin for origin in origins if origin.blocks),
        # At most all tokens but the last one, which is always computed.
        cached_tokens=min(known * facts.block_tokens, num_tokens - 1),
    )


def handoff_of(start: Start, output: "RequestOutput", facts: EngineFacts) -> Handoff:
    """Return the handoff for a decode worker; the server fills in this worker's id."""
    assert start.kv_path is not None
    params = {key: value for key, value in (output.kv_transfer_params or {}).items() if key != COUNTS}
    return Handoff(
        kv_path=start.kv_path,
        prefill_worker=WorkerId(""),
        fingerprint=facts.fingerprint,
        num_tokens=len(start.tokens) // TOKEN_BYTES,
        params=json.dumps(params).encode() if start.kv_path is KvPath.DIRECT else b"{}",
        kv=facts.kv,
    )
