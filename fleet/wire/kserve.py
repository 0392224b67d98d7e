"""Open Inference Protocol (proto/fleet/v1/kserve.proto): translates requests and answers.

Tensors have the same names as in vLLM's backend for Triton, because clients of language models know these names.

Rules:

1. A request is one prompt, in the input `text_input` or `input_ids`. Its tensors have one row, optionally with a batch
   dimension of 1. If the prompt has a batch dimension, the answer's tensors have one, too. The answer's tensors have the
   same encoding (`contents` or raw) as those of the request.
2. Each response has all requested outputs. `finish_reason` is empty except in the last response.
3. Unknown inputs, outputs and parameters are rejected by name (`fleet.wire.kserve_parameters`).
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import Finished, GenerateRequest, Logprobs, ModelCard, Prompt, TextPrompt, TokenPrompt
from fleet.v1 import kserve_pb2 as pb
from fleet.wire.kserve_parameters import SAMPLING_INPUT, read_parameters
from fleet.wire.kserve_tensors import AcceptedTensor, Elements, InputTensors, add_tensor, quoted

VERSION = "1"  # every model has only this version
PLATFORM = "fleet"
# Maximum number of characters of a request id that a client chooses. A longer id is rejected, because each response repeats the id.
MAX_ID_CHARACTERS = 256
MAX_ERROR_CHARACTERS = 500  # a longer error message is cut to this number of characters, as in the public protocol
FINAL = "triton_final_response"

_INPUTS: Mapping[str, AcceptedTensor] = {
    "text_input": AcceptedTensor(("BYTES",)),
    "input_ids": AcceptedTensor(("INT32", "INT64", "UINT32"), any_size=True),
    "stream": AcceptedTensor(("BOOL",)),
    SAMPLING_INPUT: AcceptedTensor(("BYTES",)),
    "exclude_input_in_output": AcceptedTensor(("BOOL",)),
}
_OUTPUTS: Mapping[str, AcceptedTensor] = {
    "text_output": AcceptedTensor(("BYTES",)),
    "finish_reason": AcceptedTensor(("BYTES",)),
    "output_ids": AcceptedTensor(("INT32",), any_size=True),
    "logprobs": AcceptedTensor(("BYTES",)),
}
_FIELD_NAMES: Mapping[str, str] = {"text": "text_input", "token_ids": "input_ids", "model": "model_name"}
"""Names of fields in this protocol, by the paths of the same fields in the public protocol."""


class KServeResponseFormat(Struct, frozen=True, kw_only=True):
    """The form in which a client wants its responses."""

    id: str  # the client's own id of the request, which each response repeats
    outputs: tuple[str, ...]
    raw: bool  # True if the elements of tensors are sent in raw form, apart from the tensors
    batched: bool  # True if shapes begin with a batch dimension of 1


class KServeRequest(Struct, frozen=True, kw_only=True):
    """A decoded request: what the router gets, and in which form the client wants the answer."""

    request: GenerateRequest
    stream: bool  # True if the client wants a response for each step instead of a single one at the end
    form: KServeResponseFormat
    # The client's names of fields, by their paths in the public protocol; rejections use the client's names.
    names: Mapping[str, str]


class KServePart(Struct, frozen=True, kw_only=True):
    """The content of one response: the whole answer, or the part that was generated since the previous response."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    finished: Finished | None = None  # the end of the answer; None: more responses follow


def decode_infer(
    message: pb.ModelInferRequest, request_id: RequestId, now: Nanos, latest: Nanos | None
) -> KServeRequest:
    """Decode a client's request.

    Args:
        message: The message.
        request_id: The router's own id of the request, because the client's id need not be unique.
        now: Instant of arrival by the monotonic clock.
        latest: Deadline of the gRPC call; None: the call has no deadline.

    Raises:
        RequestRejected: INVALID_ARGUMENT or MODEL_NOT_FOUND, with the name of the wrong input, output or parameter.
    """
    if len(message.id) > MAX_ID_CHARACTERS:
        raise invalid("id", f"has {len(message.id)} characters, and {MAX_ID_CHARACTERS} are allowed")
    check_version("model_version", message.model_version)
    tensors = InputTensors(message, _INPUTS)
    prompt, prompt_name = _prompt(tensors)
    if not tensors.flag("exclude_input_in_output", default=True):
        raise invalid("exclude_input_in_output", "only true is supported: the prompt is not given back")
    parameters = read_parameters(message.parameters, tensors.text(SAMPLING_INPUT) or "")
    deadlines = [
        each
        for each in (latest, None if parameters.timeout is None else Nanos(now + parameters.timeout))
        if each is not None
    ]
    stream = tensors.flag("stream", default=False)
    request = GenerateRequest(
        id=request_id,
        model=ModelName(message.model_name),
        prompt=prompt,
        sampling=parameters.sampling,
        unset=parameters.unset,
        stop=parameters.stop,
        priority=parameters.priority,
        deadline=min(deadlines, default=None),
        session=parameters.session,
        tenant=parameters.tenant,
        placement=parameters.placement,
        kv_path=parameters.kv_path,
        expected_tokens=parameters.expected_tokens,
        pin=parameters.pin,
        labels=parameters.labels,
        whole=not stream,
    )
    form = KServeResponseFormat(
        id=message.id,
        outputs=_outputs(message, with_logprobs=parameters.sampling.logprobs is not None),
        raw=tensors.raw,
        batched=tensors.batched(prompt_name),
    )
    return KServeRequest(request=request, stream=stream, form=form, names={**_FIELD_NAMES, **parameters.names})


def encode_part(
    part: KServePart,
    form: KServeResponseFormat,
    request_id: RequestId,
    model: ModelName,
    token_text: Callable[[int], str],
) -> pb.ModelInferResponse:
    """Encode one part of an answer. The last part also has the usage and the router's request id among its parameters.

    Args:
        part: The content of the part.
        form: The form in which the client wants its responses.
        request_id: The router's id of the request, for logs and explanations.
        model: The model that answered.
        token_text: Function that returns the text of a token; it is only called for log probabilities.
    """
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=form.id)
    for name in form.outputs:
        elements = _output(name, part, token_text)
        datatype = _OUTPUTS[name].datatypes[0]
        add_tensor(response, name, datatype, elements, raw=form.raw, batched=form.batched)
    if part.finished is not None:
        usage = part.finished.usage
        response.parameters["request_id"].string_param = request_id
        response.parameters["prompt_tokens"].int64_param = usage.prompt_tokens
        response.parameters["completion_tokens"].int64_param = usage.completion_tokens
        response.parameters["cached_tokens"].int64_param = usage.cached_tokens
    return response


def encode_streamed(response: pb.ModelInferResponse, *, final: bool) -> pb.ModelStreamInferResponse:
    """Wrap a response into a message of a stream; `final` is True for the last response to a request."""
    response.parameters[FINAL].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=response)


def encode_refusal(refused: RequestRejected, client_id: str, model: str) -> pb.ModelStreamInferResponse:
    """Encode the last message of a stream about a request that was rejected, or whose answer was not completed."""
    message = refused.message
    if len(message) > MAX_ERROR_CHARACTERS:
        message = f"{message[:MAX_ERROR_CHARACTERS]}…"
    failed = pb.ModelInferResponse(model_name=model[:MAX_ID_CHARACTERS], id=client_id[:MAX_ID_CHARACTERS])
    failed.parameters["error_reason"].string_param = refused.reason
    failed.parameters["error_field"].string_param = refused.field
    failed.parameters["error_cause"].string_param = refused.cause
    failed.parameters["retry_after_ms"].int64_param = refused.retry_after_ms
    streamed = encode_streamed(failed, final=True)
    streamed.error_message = message
    return streamed


def encode_model(card: ModelCard) -> pb.ModelMetadataResponse:
    """Encode the description of a model: its inputs and outputs."""
    return pb.ModelMetadataResponse(
        name=card.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_described(name, tensor) for name, tensor in _INPUTS.items()],
        outputs=[_described(name, tensor) for name, tensor in _OUTPUTS.items()],
    )


def check_version(field: str, version: str) -> None:
    """Check that the client requests the only version of a model, or none.

    Raises:
        RequestRejected: MODEL_NOT_FOUND, because the client requests a version that does not exist.
    """
    if version not in ("", VERSION):
        raise RequestRejected(
            Reason.MODEL_NOT_FOUND,
            f"{field}: {quoted(version)} does not exist; leave it empty, or say {VERSION!r}",
            field=field,
        )


def _described(name: str, tensor: AcceptedTensor) -> pb.ModelMetadataResponse.TensorMetadata:
    size = -1 if tensor.any_size else 1
    return pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=tensor.datatypes[0], shape=[size])


def _prompt(tensors: InputTensors) -> tuple[Prompt, str]:
    """Return the prompt, and the name of the input that contains it."""
    text, ids = tensors.text("text_input"), tensors.get("input_ids")
    if text is not None and ids is not None:
        raise invalid("input_ids", "is a second prompt beside text_input; send one of them")
    if text is not None:
        return TextPrompt(text), "text_input"
    if ids is None:
        raise invalid("text_input", "is missing; send it, or input_ids")
    wide = np.asarray(ids, "<i8")
    outside = (wide < 0) | (wide >= 2**32)
    if outside.any():
        index = int(outside.argmax())
        raise invalid(f"input_ids[{index}]", f"{wide[index]} is no token id")
    return TokenPrompt(wide.astype("<u4").tobytes()), "input_ids"


def _outputs(message: pb.ModelInferRequest, *, with_logprobs: bool) -> tuple[str, ...]:
    if not message.outputs:
        return ("text_output", "finish_reason", "logprobs") if with_logprobs else ("text_output", "finish_reason")
    names: list[str] = []
    for index, output in enumerate(message.outputs):
        name = output.name
        if name not in _OUTPUTS:
            raise invalid(f"outputs[{index}]", f"{quoted(name)} is not one of {', '.join(_OUTPUTS)}")
        if name in names:
            raise invalid(f"outputs[{index}]", f"{name} is there twice")
        if output.parameters:
            raise invalid(name, f"{quoted(min(output.parameters))} is not a known parameter of an output")
        if name == "logprobs" and not with_logprobs:
            raise invalid(name, "say by the parameter logprobs how many alternatives each token is to have")
        names.append(name)
    return tuple(names)


def _output(name: str, part: KServePart, token_text: Callable[[int], str]) -> Elements:
    match name:
        case "text_output":
            return [part.text.encode()]
        case "finish_reason":
            return [b"" if part.finished is None else part.finished.finish.value.encode()]
        case "output_ids":
            return part.token_ids
        case _:
            assert name == "logprobs", name
            return [_logprobs(part, token_text)]


def _logprobs(part: KServePart, token_text: Callable[[int], str]) -> bytes:
    """Encode log probabilities as a JSON list with one object per token."""
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
