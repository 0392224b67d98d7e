"""The Open Inference Protocol (proto/fleet/v1/kserve.proto) to and from our values. Pure.

Tensors and their names are those of vLLM's backend for Triton, which clients of language models know.

Rules:

1. A request is one prompt, `text_input` or `input_ids`. Its tensors have one row, with or without a batch dimension of 1
   before it; the answer's tensors are shaped like the prompt, and encoded (`contents` or raw) as the request is.
2. Sampling parameters come as JSON in the input `sampling_parameters`, or one by one as parameters of the request: as
   numbers, or as text, since not every client's protocol has fractions. None may come in both.
3. What we do not know is refused by name: an input, an output or a parameter that is ignored would change the answer
   without a word. `sequence_start` and `sequence_end` alone are ignored; our sessions need neither.
4. `priority` counts as Triton's: 1 goes first, and 0 is the default. It stands where 101 does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from fleet.clock import MILLISECOND, Nanos
from fleet.errors import Reason, Refused, invalid
from fleet.ids import ModelName, RequestId
from fleet.requests import Finished, GenerateRequest, Logprobs, ModelCard, Prompt, Sampling, TextPrompt, TokenPrompt
from fleet.roles import KvPath, Placement
from fleet.v1 import kserve_pb2 as pb

VERSION = "1"  # of every model
PLATFORM = "fleet"
MAX_ID_CHARACTERS = 256  # it goes back with every response
MAX_ERROR_CHARACTERS = 500
MAX_TIMEOUT_MICROSECONDS = (2**32 - 1) * 1000  # as far as the other fronts go, 49 days
DEFAULT_PRIORITY = 101  # where the highest of ours, 100, is Triton's 1
LENGTH_BYTES = 4  # before each element of raw BYTES
FINAL = "triton_final_response"

_SHOWN_SIZES = 8
_SHOWN_CHARACTERS = 100


class _Datatype(Struct, frozen=True):
    contents: str  # field of InferTensorContents
    numpy: str = ""  # of raw contents; empty: each element after its length


_DATATYPES: Mapping[str, _Datatype] = {
    "BOOL": _Datatype("bool_contents", "<u1"),
    "INT32": _Datatype("int_contents", "<i4"),
    "INT64": _Datatype("int64_contents", "<i8"),
    "UINT32": _Datatype("uint_contents", "<u4"),
    "BYTES": _Datatype("bytes_contents"),
}
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "text_input": ("BYTES",),
    "input_ids": ("INT32", "INT64", "UINT32"),
    "stream": ("BOOL",),
    "sampling_parameters": ("BYTES",),
    "exclude_input_in_output": ("BOOL",),
}
_OUTPUTS: Mapping[str, str] = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "output_ids": "INT32",
    "logprobs": "BYTES",
}
_ANY_SIZE = ("input_ids", "output_ids")

Elements = Sequence[Any]
Parameter = bool | int | float | str


class SamplingParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input `sampling_parameters`; names are vLLM's. Null is the same as absent."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1: off, as 0 is
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    stop: str | list[str] | None = None
    # Only to be refused unless they say what happens anyway; see _ALREADY_SO.
    n: Any = None
    best_of: Any = None
    detokenize: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    use_beam_search: Any = None


_ALREADY_SO: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "detokenize": True,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "use_beam_search": False,
}


class RequestParameters(SamplingParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request: those of sampling, and what else there is to say of it."""

    priority: Annotated[int, Meta(ge=0, le=2 * DEFAULT_PRIORITY - 1)] = 0
    timeout: Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MICROSECONDS)] = 0  # microseconds from arrival; 0: none
    session: str = ""
    sequence_id: Any = 0  # what Triton calls a session: a number or a text
    sequence_start: bool = False
    sequence_end: bool = False
    tenant: str = ""
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    triton_enable_empty_final_response: bool = False  # our final response always comes, and has its outputs


_SAMPLING = tuple(name for name in Sampling.__struct_fields__ if name in SamplingParameters.__struct_fields__)

_NAMES: Mapping[str, str] = {
    "text": "text_input",
    "token_ids": "input_ids",
    "model": "model_name",
    "timeout_ms": "timeout",
    **{f"sampling.{name}": name for name in _SAMPLING},
}
"""Field paths of the public protocol to those of this one."""


class Form(Struct, frozen=True, kw_only=True):
    """How a client wants to be answered."""

    id: str  # its own, given back
    outputs: tuple[str, ...]
    raw: bool  # the elements of tensors lie beside them
    batched: bool  # shapes begin with a dimension of 1


class Inference(Struct, frozen=True, kw_only=True):
    """A request as we understood it."""

    request: GenerateRequest
    stream: bool  # a response for every step, in place of one
    form: Form
    names: Mapping[str, str]  # of fields, for refusals that come later


class Part(Struct, frozen=True, kw_only=True):
    """What one response says of an answer: all of it, or what came since the last one."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    finished: Finished | None = None  # None: there is more to come


def decode_infer(message: pb.ModelInferRequest, request_id: RequestId, now: Nanos, latest: Nanos | None) -> Inference:
    """A client's message as a request.

    Args:
        message: As it came.
        request_id: The router's name for the request; the client's own need not be unique.
        now: When it came.
        latest: The call's deadline.

    Raises:
        Refused: INVALID_ARGUMENT or MODEL_NOT_FOUND, naming the input, output or parameter.
    """
    if len(message.id) > MAX_ID_CHARACTERS:
        raise invalid("id", f"has {len(message.id)} characters, and {MAX_ID_CHARACTERS} are allowed")
    check_version("model_version", message.model_version)
    tensors = _Tensors(message)
    prompt = _prompt(tensors)
    told = _request_parameters(message.parameters)
    sampling, stop, names = _sampling(tensors, told)
    session, names["session"] = _session(told)
    if tensors.flag("exclude_input_in_output", default=True) is False:
        raise invalid("exclude_input_in_output", "must be true: the prompt is not given back")
    deadlines = [] if latest is None else [latest]
    if told.timeout:
        deadlines.append(Nanos(now + told.timeout * MILLISECOND // 1000))
    request = GenerateRequest(
        id=request_id,
        model=ModelName(message.model_name),
        prompt=prompt,
        sampling=sampling,
        stop=stop,
        priority=DEFAULT_PRIORITY - told.priority if told.priority else 0,
        deadline=min(deadlines, default=None),
        session=session,
        tenant=told.tenant,
        placement=told.placement,
        kv_path=told.kv_path,
    )
    form = Form(
        id=message.id,
        outputs=_outputs(message, with_logprobs=sampling.logprobs is not None),
        raw=tensors.raw,
        batched=tensors.batched,
    )
    return Inference(request=request, stream=tensors.flag("stream", default=False), form=form, names=names)


def encode_part(
    part: Part, form: Form, request_id: RequestId, model: ModelName, token_text: Callable[[int], str]
) -> pb.ModelInferResponse:
    """A response. The last one of a request says in its parameters what was used, and the router's name for the request.

    Args:
        part: What it says.
        form: How.
        request_id: The router's name for the request.
        model: Which answered.
        token_text: Asked for log probabilities only.
    """
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=form.id)
    for name in form.outputs:
        match name:
            case "text_output":
                elements: Elements = [part.text.encode()]
            case "finish_reason":
                elements = [b"" if part.finished is None else part.finished.finish.value.encode()]
            case "output_ids":
                elements = part.token_ids
            case _:
                elements = [_logprobs_json(part, token_text)]
        _add_tensor(response, name, elements, form)
    if part.finished is not None:
        usage = part.finished.usage
        response.parameters["request_id"].string_param = request_id
        response.parameters["prompt_tokens"].int64_param = usage.prompt_tokens
        response.parameters["completion_tokens"].int64_param = usage.completion_tokens
        response.parameters["cached_tokens"].int64_param = usage.cached_tokens
    return response


def encode_streamed(response: pb.ModelInferResponse, *, final: bool) -> pb.ModelStreamInferResponse:
    """A response as one of a stream."""
    response.parameters[FINAL].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=response)


def encode_refusal(refused: Refused, client_id: str, model: str) -> pb.ModelStreamInferResponse:
    """The last response to a request of a stream that was not, or not completely, served."""
    message = refused.message
    if len(message) > MAX_ERROR_CHARACTERS:
        message = f"{message[:MAX_ERROR_CHARACTERS]}…"
    failed = pb.ModelInferResponse(model_name=model[:MAX_ID_CHARACTERS], id=client_id[:MAX_ID_CHARACTERS])
    failed.parameters["error_reason"].string_param = refused.reason
    failed.parameters["error_field"].string_param = refused.field
    failed.parameters["retry_after_ms"].int64_param = refused.retry_after_ms
    streamed = encode_streamed(failed, final=True)
    streamed.error_message = message
    return streamed


def encode_model(card: ModelCard) -> pb.ModelMetadataResponse:
    """What a model takes and gives."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=card.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=types[0], shape=[_size(name)]) for name, types in _INPUTS.items()],
        outputs=[tensor(name=name, datatype=datatype, shape=[_size(name)]) for name, datatype in _OUTPUTS.items()],
    )


def check_version(field: str, version: str) -> None:
    """Models have one version.

    Raises:
        Refused: MODEL_NOT_FOUND.
    """
    if version not in ("", VERSION):
        raise Refused(
            Reason.MODEL_NOT_FOUND,
            f"{field}: {_quoted(version)} does not exist; leave it empty, or say {VERSION!r}",
            field=field,
        )


class _Tensors:
    """The inputs of a message, checked for being what their names say."""

    def __init__(self, message: pb.ModelInferRequest) -> None:
        self.raw = bool(message.raw_input_contents)
        self.batched = False  # as the prompt is
        self._elements: dict[str, Elements] = {}
        if self.raw and len(message.raw_input_contents) != len(message.inputs):
            raise invalid(
                "raw_input_contents",
                f"has {len(message.raw_input_contents)} entries for {len(message.inputs)} inputs; send one for each, or none",
            )
        for index, tensor in enumerate(message.inputs):
            if tensor.name not in _INPUTS:
                raise invalid(f"inputs[{index}]", f"{_quoted(tensor.name)} is not one of {', '.join(_INPUTS)}")
            if tensor.name in self._elements:
                raise invalid(tensor.name, "is there twice")
            raw = message.raw_input_contents[index] if self.raw else None
            self._elements[tensor.name] = _elements(tensor, raw)
            if tensor.name in ("text_input", "input_ids"):
                self.batched = len(tensor.shape) > 1

    def get(self, name: str) -> Elements | None:
        return self._elements.get(name)

    def text(self, name: str) -> str | None:
        """The one element of an input that is text.

        Raises:
            Refused: It is not UTF-8.
        """
        if (elements := self._elements.get(name)) is None:
            return None
        content: bytes = elements[0]
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise invalid(name, f"is not valid UTF-8: {error.reason}") from error

    def flag(self, name: str, *, default: bool) -> bool:
        elements = self._elements.get(name)
        return default if elements is None else bool(elements[0])


def _elements(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Elements:
    """What a tensor holds, from either of its two forms."""
    name, shape = tensor.name, tensor.shape
    if tensor.datatype not in _INPUTS[name]:
        raise invalid(name, f"must be {' or '.join(_INPUTS[name])}, not {_quoted(tensor.datatype)}")
    if tensor.parameters:
        raise invalid(f"{name}.{min(tensor.parameters)[:_SHOWN_CHARACTERS]}", "is not a known parameter of an input")
    if not 1 <= len(shape) <= 2 or (len(shape) == 2 and shape[0] != 1) or shape[-1] < 0:
        raise invalid(name, f"its shape must be {_shapes(name)}, not {_shown(shape)}: a request has one prompt")
    size = shape[-1]
    if size != 1 and name not in _ANY_SIZE:
        raise invalid(name, f"its shape must be {_shapes(name)}, not {_shown(shape)}: it is one element")
    datatype = _DATATYPES[tensor.datatype]
    elements: Elements
    if raw is None:
        elements, where = getattr(tensor.contents, datatype.contents), datatype.contents
    elif tensor.HasField("contents"):
        raise invalid(name, "has contents, and the message has raw_input_contents; use one of them")
    else:
        elements, where = _unpacked(name, raw, datatype), "raw_input_contents"
    if len(elements) != size:
        raise invalid(name, f"has {len(elements)} elements in {where}, and its shape says {size}")
    return elements


def _unpacked(name: str, raw: bytes, datatype: _Datatype) -> Elements:
    if datatype.numpy:
        width = np.dtype(datatype.numpy).itemsize
        if len(raw) % width:
            raise invalid(name, f"has {len(raw)} raw bytes, which is no number of elements of {width}")
        unpacked: Elements = np.frombuffer(raw, datatype.numpy)  # type: ignore[assignment]  # as good as a sequence
        return unpacked
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < LENGTH_BYTES or len(raw) < end:
        raise invalid(
            name, f"its {len(raw)} raw bytes end within an element: each has its length before it, in 4 bytes"
        )
    if len(raw) > end:
        raise invalid(name, f"has {len(raw) - end} raw bytes after its only element")
    return [raw[LENGTH_BYTES:end]]


def _prompt(tensors: _Tensors) -> Prompt:
    text, ids = tensors.text("text_input"), tensors.get("input_ids")
    if text is not None and ids is not None:
        raise invalid("input_ids", "and text_input are two prompts; send one")
    if text is not None:
        return TextPrompt(text)
    if ids is None:
        raise invalid("text_input", "is missing; send it, or input_ids")
    wide = np.asarray(ids, "<i8")
    outside = (wide < 0) | (wide >= 2**32)
    if outside.any():
        index = int(outside.argmax())
        raise invalid(f"input_ids[{index}]", f"{wide[index]} is no token id")
    return TokenPrompt(wide.astype("<u4").tobytes())


def _request_parameters(parameters: Mapping[str, pb.InferParameter]) -> RequestParameters:
    given: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise invalid(name[:_SHOWN_CHARACTERS], "has no value")
        given[name] = getattr(parameter, choice)
    if len(given) > len(RequestParameters.__struct_fields__):
        unknown = min(given.keys() - set(RequestParameters.__struct_fields__))
        raise invalid(unknown[:_SHOWN_CHARACTERS], "is not a known parameter")
    return _converted(lambda: msgspec.convert(given, RequestParameters, strict=False), "")


def _sampling(tensors: _Tensors, told: RequestParameters) -> tuple[Sampling, tuple[str, ...], dict[str, str]]:
    """Sampling parameters and stop strings, and what the client called the fields."""
    field = "sampling_parameters"
    content = tensors.text(field)
    listed = SamplingParameters() if not content else _decoded(content, field)
    names, given = dict(_NAMES), {}
    for name in SamplingParameters.__struct_fields__:
        here, there = getattr(listed, name), getattr(told, name)
        if here is not None and there is not None:
            raise invalid(name, f"is a parameter of the request and in {field} too; say it once")
        value, called = (there, name) if here is None else (here, f"{field}.{name}")
        if value is None:
            continue
        if name in _ALREADY_SO and value != _ALREADY_SO[name]:
            only = msgspec.json.encode(_ALREADY_SO[name]).decode()
            raise invalid(called, f"only {only} is supported")
        given[name] = value
        names["stop" if name == "stop" else f"sampling.{name}"] = called
    if given.get("top_k") == -1:
        given["top_k"] = 0
    stop = given.get("stop", ())
    sampling = Sampling(
        **{name: tuple(given[name]) if name == "stop_token_ids" else given[name] for name in _SAMPLING if name in given}
    )
    return sampling, (stop,) if isinstance(stop, str) else tuple(stop), names


def _decoded(content: str, field: str) -> SamplingParameters:
    try:
        return _converted(lambda: msgspec.json.decode(content, type=SamplingParameters, strict=False), field)
    except RecursionError as error:
        raise invalid(field, "is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise invalid(field, f"is not valid JSON: {error}") from error


def _session(told: RequestParameters) -> tuple[str, str]:
    """The session, and what the client called it."""
    if told.sequence_id in (0, "", None):
        return told.session, "session"
    if told.session:
        raise invalid("sequence_id", "and session say the same; send one")
    if not isinstance(told.sequence_id, int | str) or isinstance(told.sequence_id, bool):
        raise invalid("sequence_id", "must be a number or a text")
    return str(told.sequence_id), "sequence_id"


def _outputs(message: pb.ModelInferRequest, *, with_logprobs: bool) -> tuple[str, ...]:
    if not message.outputs:
        return ("text_output", "finish_reason", *(("logprobs",) if with_logprobs else ()))
    names: dict[str, None] = {}
    for index, output in enumerate(message.outputs):
        if output.name not in _OUTPUTS:
            raise invalid(f"outputs[{index}]", f"{_quoted(output.name)} is not one of {', '.join(_OUTPUTS)}")
        if output.name in names:
            raise invalid(f"outputs[{index}]", f"{output.name} is there twice")
        if output.parameters:
            unknown = min(output.parameters)[:_SHOWN_CHARACTERS]
            raise invalid(f"{output.name}.{unknown}", "is not a known parameter of an output")
        if output.name == "logprobs" and not with_logprobs:
            raise invalid("logprobs", "say by the parameter of the same name how many alternatives to give")
        names[output.name] = None
    return tuple(names)


def _add_tensor(response: pb.ModelInferResponse, name: str, elements: Elements, form: Form) -> None:
    datatype = _DATATYPES[_OUTPUTS[name]]
    shape = [1, len(elements)] if form.batched else [len(elements)]
    tensor = response.outputs.add(name=name, datatype=_OUTPUTS[name], shape=shape)
    if not form.raw:
        getattr(tensor.contents, datatype.contents).extend(elements)
    elif datatype.numpy:
        response.raw_output_contents.append(np.asarray(elements, datatype.numpy).tobytes())
    else:
        response.raw_output_contents.append(
            b"".join(len(element).to_bytes(LENGTH_BYTES, "little") + element for element in elements)
        )


def _logprobs_json(part: Part, token_text: Callable[[int], str]) -> bytes:
    """A JSON list with an object for each token: its log probability, and the most likely ones."""
    return msgspec.json.encode(
        [
            {
                "token_id": token_id,
                "logprob": one.chosen,
                "top": [
                    {"token_id": likely, "logprob": logprob, "text": token_text(likely)}
                    for likely, logprob in zip(one.top_ids, one.top, strict=True)
                ],
            }
            for token_id, one in zip(part.token_ids, part.logprobs, strict=False)
        ]
    )


AnyStruct = TypeVar("AnyStruct", bound=Struct)


def _converted(convert: Callable[[], AnyStruct], parent: str) -> AnyStruct:
    """What `convert` gives, its errors as refusals; msgspec ends its messages with the path."""
    try:
        return convert()
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = (parent + path.removesuffix("`")).removeprefix(".")
        if message.startswith("Object contains unknown field `"):
            unknown = message.partition("`")[2].removesuffix("`")[:_SHOWN_CHARACTERS]
            raise invalid(f"{field}.{unknown}".removeprefix("."), "is not a known parameter") from error
        raise invalid(field or parent, message[0].lower() + message[1:]) from error


def _size(name: str) -> int:
    return -1 if name in _ANY_SIZE else 1


def _shapes(name: str) -> str:
    return "[n] or [1, n]" if name in _ANY_SIZE else "[1] or [1, 1]"


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:_SHOWN_SIZES]))}{', …' if len(shape) > _SHOWN_SIZES else ''}]"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")
