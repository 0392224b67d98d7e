"""Acceptance check: decides which attempts a worker refuses before the engine gets them."""

from collections.abc import Iterable

from fleet.core.errors import Reason
from fleet.core.requests import IMAGES, TOKEN_BYTES, Sampling, engine_fields, state_fields
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import Handoff, Rejected, Start
from kvstore.block import SALT_BYTES
from kvstore.layouts.fingerprint import Fingerprint, Incompatible, negotiate
from workers.ports import EngineFacts

TAKES: dict[Role, frozenset[Phase]] = {
    Role.PREFILL: frozenset({Phase.PREFILL}),
    Role.DECODE: frozenset({Phase.DECODE, Phase.AGGREGATED}),
    Role.BOTH: frozenset(Phase),
}


def refusal(start: Start, role: Role, facts: EngineFacts) -> Rejected | None:
    """Return the rejection of the attempt `start`, or None if this worker accepts the attempt."""
    return (
        _unfit_phase(start, role)
        or _unfit_task(start, facts)
        or _unfit_prompt(start, facts)
        or _unfit_adapter(start, facts)
        or _unparsed(start, facts)
        or _unfit_continuation(start, facts)
        or _unfit_kv(start, facts)
    )


def field_beyond_vocabulary(sampling: Sampling, vocab_size: int) -> str | None:
    """Return the first sampling field that names a token outside the vocabulary, or None if there is none.

    Such a token could make an engine fail.
    """
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token for token, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_tokens": (token for sequence in sampling.bad_tokens for token in sequence),
    }
    return next((field for field, ids in named.items() if any(token >= vocab_size for token in ids)), None)


def _unfit_phase(start: Start, role: Role) -> Rejected | None:
    if start.phase in TAKES[role]:
        return None
    takes = " and ".join(sorted(TAKES[role]))
    return _invalid(start, "phase", f"this is a {role} worker, it takes {takes} work and not {start.phase}")


def _unfit_task(start: Start, facts: EngineFacts) -> Rejected | None:
    if start.pooling is None and facts.pooling is None:
        return None
    if start.pooling is None:
        assert facts.pooling is not None
        return _invalid(start, "pooling", f"is required; this worker's model has the task {facts.pooling.task}")
    if facts.pooling is None:
        return _invalid(start, "pooling", "this worker's model generates tokens, and has no vectors")
    if start.pooling.task is not facts.pooling.task:
        return _invalid(start, "pooling.task", f"is {start.pooling.task}, and this worker's is {facts.pooling.task}")
    if start.phase is not Phase.AGGREGATED:
        return _invalid(start, "phase", f"a vector is the work of one worker, and this is {start.phase} work")
    if start.pooling.first_tokens > start.num_tokens:
        return _invalid(start, "pooling.first_tokens", f"{start.pooling.first_tokens} is more than the whole prompt")
    return None


def _unfit_prompt(start: Start, facts: EngineFacts) -> Rejected | None:
    if not start.tokens or len(start.tokens) % TOKEN_BYTES:
        return _invalid(start, "tokens", f"{len(start.tokens)} bytes; at least one id of {TOKEN_BYTES} bytes is needed")
    if len(start.salt) not in (0, SALT_BYTES):
        return _invalid(start, "salt", f"has 0 or {SALT_BYTES} bytes, not {len(start.salt)}")
    if start.sampling.max_tokens < 1:
        return _invalid(start, "sampling.max_tokens", f"must be at least 1, not {start.sampling.max_tokens}")
    if start.sampling.form is not None and not facts.keeps_forms:
        return _invalid(
            start, "sampling.form", f"this worker's engine ({facts.name}) supports no structured output; leave it out"
        )
    for field in engine_fields(start.sampling):
        if field not in facts.sampling_fields:
            return _invalid(
                start, f"sampling.{field}", f"this worker's engine ({facts.name}) does not obey it; leave it out"
            )
    if start.images and IMAGES not in facts.sampling_fields:
        return _invalid(start, "images", f"this worker's engine ({facts.name}) takes none")
    if start.images and start.phase is not Phase.AGGREGATED:
        return _invalid(start, "images", f"need one worker for prompt and answer, and this is {start.phase} work")
    if start.sampling.prompt_logprobs is not None and start.phase is not Phase.AGGREGATED:
        return _invalid(
            start, "sampling.prompt_logprobs", f"needs one worker for prompt and answer, and this is {start.phase} work"
        )
    prompt = len(start.tokens) // TOKEN_BYTES
    answer = 1 if start.phase is Phase.PREFILL else start.sampling.max_tokens
    if start.pooling is not None:
        answer = 0  # a request for a vector generates no tokens, so only its prompt has to fit into the context
    if prompt + answer > facts.max_model_len:
        return Rejected(
            request_id=start.request_id,
            reason=Reason.TOO_LARGE,
            message=f"{prompt} prompt tokens and {answer} to generate exceed the {facts.max_model_len} of this model",
            field="tokens",
        )
    return None


def _unfit_adapter(start: Start, facts: EngineFacts) -> Rejected | None:
    if not start.adapter:
        return None
    if all(start.adapter != adapter.name for adapter in facts.adapters):
        message = f"adapter: this worker does not have {start.adapter!r}; another worker may have it"
        return Rejected(request_id=start.request_id, reason=Reason.NO_WORKER, message=message, field="adapter")
    if not start.salt:
        return _invalid(
            start, "salt", "is required with an adapter; it keeps the adapter's blocks apart from the model's"
        )
    return None


def _unparsed(start: Start, facts: EngineFacts) -> Rejected | None:
    if start.parsing is None or facts.parsers is not None:
        return None
    message = f"parsing: this worker's engine ({facts.name}) has no parser for its answers; another worker may have one"
    return Rejected(request_id=start.request_id, reason=Reason.NO_WORKER, message=message, field="parsing")


def _unfit_continuation(start: Start, facts: EngineFacts) -> Rejected | None:
    if not start.generated_tokens:
        return None
    if start.generated_tokens >= len(start.tokens) // TOKEN_BYTES:
        return _invalid(start, "generated_tokens", "must leave at least one token of the prompt")
    fields = state_fields(start.sampling)
    if fields and start.phase is not Phase.AGGREGATED:
        return _invalid(start, "generated_tokens", f"with sampling.{fields[0]} needs one worker for prompt and answer")
    if missing := [field for field in fields if field not in facts.continued_fields]:
        message = (
            f"generated_tokens: this worker's engine ({facts.name}) cannot continue an answer with"
            f" sampling.{missing[0]}; another worker may"
        )
        return Rejected(request_id=start.request_id, reason=Reason.NO_WORKER, message=message, field="generated_tokens")
    return None


def _unfit_kv(start: Start, facts: EngineFacts) -> Rejected | None:
    if start.phase is Phase.PREFILL:
        if start.kv_path is None:
            return _invalid(start, "kv_path", "is required for prefill; it says how the blocks will be fetched")
        if start.kv_path not in facts.kv_paths:
            return _mismatch(start, "kv_path", f"this worker cannot hand blocks over by the path '{start.kv_path}'")
    if start.phase is Phase.DECODE:
        handoff = start.handoff
        if handoff is None:
            return _invalid(start, "handoff", "is required for decode; it comes from a prefill worker")
        if handoff.fingerprint != facts.fingerprint:
            return _other_values(start, handoff, facts)
        if handoff.kv_path not in facts.kv_paths:
            return _mismatch(
                start, "handoff.kv_path", f"this worker cannot fetch blocks by the path '{handoff.kv_path}'"
            )
        if handoff.kv_path is KvPath.DIRECT and handoff.kv != facts.kv:
            layouts = f"{_layout(handoff.kv)} at {handoff.prefill_worker} and {_layout(facts.kv)} here"
            return _mismatch(start, "handoff.kv", f"blocks have {layouts}; only the store converts them")
    return None


def _other_values(start: Start, handoff: Handoff, facts: EngineFacts) -> Rejected:
    """Return the rejection of a handoff whose blocks this worker cannot use, because their fingerprint differs.

    If both fingerprints are known, the message names the first field in which they differ.
    """
    if handoff.kv is not None and facts.kv is not None:
        agreement = negotiate(writer=handoff.kv, reader=facts.kv)
        if isinstance(agreement, Incompatible):
            return _mismatch(start, f"handoff.kv.{agreement.field}", agreement.reason)
    return _mismatch(
        start,
        "handoff.fingerprint",
        f"the KV namespace {handoff.fingerprint} of {handoff.prefill_worker} is not this worker's"
        f" {facts.fingerprint}: model, weights, dtype, block size and heads must all be equal",
    )


def _layout(kv: Fingerprint | None) -> str:
    return "an unknown layout" if kv is None else f"layout {kv.layout} on {kv.tp} rank{'s' if kv.tp > 1 else ''}"


def _invalid(start: Start, field: str, message: str) -> Rejected:
    return Rejected(
        request_id=start.request_id, reason=Reason.INVALID_ARGUMENT, message=f"{field}: {message}", field=field
    )


def _mismatch(start: Start, field: str, message: str) -> Rejected:
    return Rejected(request_id=start.request_id, reason=Reason.KV_MISMATCH, message=f"{field}: {message}", field=field)
