"""Parameters of the Open Inference Protocol: decodes everything in a request besides its prompt.

Rules:

1. Sampling parameters are sent as JSON in the input `sampling_parameters`, or one by one as request parameters. Request parameters may be
   numbers or text, because in some versions of the protocol numbers have no fractions. A parameter must not be sent in both ways.
2. Unknown parameters are rejected by name, because ignoring one would silently change the answer. Some known parameters have no effect:
   `sequence_start` and `sequence_end` (sessions do not need them), `triton_enable_empty_final_response`, and the parameters with only one
   accepted value (`_FIXED_VALUES`).
3. `priority` has Triton's meaning: 1 goes first, and 0 is the default, which equals 101.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import invalid, split_validation_error, with_allowed_values
from fleet.core.requests import DEFAULT_FIELDS, Sampling
from fleet.core.roles import KvPath, Placement
from fleet.core.validation import unsigned_seed
from fleet.v1 import kserve_pb2 as pb

MAX_TIMEOUT_MICROSECONDS = (2**32 - 1) * 1000  # maximum timeout in microseconds: 49 days, as in the other protocols
# The value of `priority` that means Fleet's default priority. Triton's priority 1 becomes Fleet's highest priority, 100.
DEFAULT_PRIORITY = 101
SAMPLING_INPUT = "sampling_parameters"

_SHOWN_CHARACTERS = 100


class SamplingParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input `sampling_parameters`, with vLLM's names. A null counts as absent."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 and 0 mean that the parameter is off
    min_p: float | None = None
    seed: int | None = None  # -1 means no seed
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    stop: str | list[str] | None = None
    # The following fields exist only so that values other than those in `_FIXED_VALUES` are rejected with a clear message.
    n: int | None = None
    best_of: int | None = None
    detokenize: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None


class RequestParameters(SamplingParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All request parameters: the sampling parameters and all others."""

    priority: Annotated[int, Meta(ge=0, le=2 * DEFAULT_PRIORITY - 1)] = 0
    # Microseconds from the arrival of the request; 0: no limit.
    timeout: Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MICROSECONDS)] = 0
    session: str = ""
    sequence_id: Any = 0  # the session, under Triton's name: a number or a text
    sequence_start: bool = False
    sequence_end: bool = False
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    expected_tokens: int = 0
    pin: str = ""
    labels: str = ""  # labels that the worker must have, separated by commas
    # This parameter has no effect, because the last response of a stream is never empty.
    triton_enable_empty_final_response: bool = False


_FIXED_VALUES: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "detokenize": True,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "use_beam_search": False,
}
"""Parameters that have no effect, each with the only value that is accepted."""

_SAMPLING = tuple(name for name in Sampling.__struct_fields__ if name in SamplingParameters.__struct_fields__)


class KServeOptions(Struct, frozen=True, kw_only=True):
    """The decoded parameters of a request."""

    sampling: Sampling
    unset: frozenset[str]  # fields of `sampling` that are left out (`GenerateRequest.unset`)
    stop: tuple[str, ...]
    priority: int
    timeout: Nanos | None
    session: str
    tenant: str
    placement: Placement
    kv_path: KvPath | None
    expected_tokens: int
    pin: str
    labels: tuple[str, ...]
    names: Mapping[str, str]  # the client's names of fields, by their paths in the public protocol


def read_parameters(parameters: Mapping[str, pb.InferParameter], listed: str) -> KServeOptions:
    """Decode the parameters of a request.

    Args:
        parameters: The request parameters.
        listed: Content of the input `sampling_parameters`; empty: the request has no such input.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the parameter's name as the client wrote it.
    """
    one_by_one = _request_parameters(parameters)
    together = _listed_parameters(listed) if listed else SamplingParameters()
    names = {"timeout_ms": "timeout"}
    given: dict[str, Any] = {}
    for name in SamplingParameters.__struct_fields__:
        alone, inside = getattr(one_by_one, name), getattr(together, name)
        if alone is not None and inside is not None:
            raise invalid(name, f"is a parameter of the request and in {SAMPLING_INPUT} too; say it once")
        value, called = (alone, name) if inside is None else (inside, f"{SAMPLING_INPUT}.{name}")
        if value is None:
            continue
        if name in _FIXED_VALUES and value != _FIXED_VALUES[name]:
            only = msgspec.json.encode(_FIXED_VALUES[name]).decode()
            raise invalid(called, f"only {only} is supported")
        given[name] = value
        names["stop" if name == "stop" else f"sampling.{name}"] = called
    session, names["session"] = _session(one_by_one)
    return KServeOptions(
        sampling=_sampling(given, names),
        unset=DEFAULT_FIELDS.difference(given),
        stop=_strings(given.get("stop", ())),
        priority=DEFAULT_PRIORITY - one_by_one.priority if one_by_one.priority else 0,
        timeout=Nanos(one_by_one.timeout * MILLISECOND // 1000) if one_by_one.timeout else None,
        session=session,
        tenant=one_by_one.tenant,
        placement=one_by_one.placement,
        kv_path=one_by_one.kv_path,
        expected_tokens=one_by_one.expected_tokens,
        pin=one_by_one.pin,
        labels=tuple(label.strip() for label in one_by_one.labels.split(",") if label.strip()),
        names=names,
    )


def _request_parameters(parameters: Mapping[str, pb.InferParameter]) -> RequestParameters:
    given: dict[str, bool | int | float | str] = {}
    for name, parameter in parameters.items():
        if name not in RequestParameters.__struct_fields__:
            raise invalid(name[:_SHOWN_CHARACTERS], "is not a known parameter of a request")
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise invalid(name, "has no value")
        given[name] = getattr(parameter, choice)
    return _converted(lambda: msgspec.convert(given, RequestParameters, strict=False), RequestParameters, "")


def _listed_parameters(content: str) -> SamplingParameters:
    try:
        return _converted(
            lambda: msgspec.json.decode(content, type=SamplingParameters, strict=False),
            SamplingParameters,
            SAMPLING_INPUT,
        )
    except RecursionError as error:
        raise invalid(SAMPLING_INPUT, "is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise invalid(SAMPLING_INPUT, f"is not valid JSON: {error}") from error


def _sampling(given: Mapping[str, Any], names: Mapping[str, str]) -> Sampling:
    ours = {name: given[name] for name in _SAMPLING if name in given}
    if ours.get("top_k") == -1:
        ours["top_k"] = 0
    if "seed" in ours:
        ours["seed"] = unsigned_seed(ours["seed"], names["sampling.seed"])
    if "stop_token_ids" in ours:
        ours["stop_token_ids"] = tuple(ours["stop_token_ids"])
    return Sampling(**ours)


def _strings(stop: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _session(parameters: RequestParameters) -> tuple[str, str]:
    """Return the session (empty: the request has none), and the name of the parameter in which the client sent it."""
    if parameters.sequence_id in (0, "", None):
        return parameters.session, "session"
    if parameters.session:
        raise invalid("sequence_id", "says the same as session; send one of them")
    if isinstance(parameters.sequence_id, bool) or not isinstance(parameters.sequence_id, int | str):
        raise invalid("sequence_id", "must be a number or a text")
    return str(parameters.sequence_id), "sequence_id"


AnyStruct = TypeVar("AnyStruct", bound=Struct)


def _converted(convert: Callable[[], AnyStruct], kind: type[AnyStruct], parent: str) -> AnyStruct:
    """Return the result of `convert`. If it raises an error, reject the request with the path of the wrong value."""
    try:
        return convert()
    except msgspec.ValidationError as error:
        message, path = split_validation_error(error)
        message = with_allowed_values(message, kind, path)
        field = (parent + path).removeprefix(".")
        before, _, unknown = message.partition(" unknown field `")
        if before == "Object contains":
            raise invalid(f"{field}.{unknown[:-1][:_SHOWN_CHARACTERS]}", "is not a known parameter") from error
        raise invalid(field, message[0].lower() + message[1:]) from error
