import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import Finish, Finished, TextPrompt, TokenPrompt, Usage
from fleet.v1 import kserve_pb2 as pb
from fleet.wire.kserve import MAX_ID_CHARACTERS, KServePart, KServeRequest, decode_infer, encode_part, encode_refusal
from tests.support.builders import token_ids
from tests.support.router.fake_router import a_model_card

NOW = Nanos(10 * SECOND)
FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
}


def a_tensor(name, datatype, elements, shape=None) -> pb.ModelInferRequest.InferInputTensor:
    contents = pb.InferTensorContents(**{FIELDS[datatype]: elements})
    shape = [len(elements)] if shape is None else shape
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=contents)


def a_text(name="text_input", text="once", **fields):
    return a_tensor(name, "BYTES", [text.encode()], **fields)


def a_message(*tensors, parameters=None, **fields) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="tiny", inputs=tensors or [a_text()], **fields)
    for name, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def raw(*tensors: tuple[str, str, list[int], bytes]) -> pb.ModelInferRequest:
    """Return a request with these raw input tensors: name, datatype, shape and content of each."""
    tensor = pb.ModelInferRequest.InferInputTensor
    return pb.ModelInferRequest(
        inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape, _ in tensors],
        raw_input_contents=[content for *_, content in tensors],
    )


def packed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def decoded(message: pb.ModelInferRequest, latest: Nanos | None = None) -> KServeRequest:
    return decode_infer(message, RequestId("r1"), NOW, latest)


def refusal(message: pb.ModelInferRequest) -> RequestRejected:
    with pytest.raises(RequestRejected) as raised:
        decoded(message)
    assert raised.value.message.startswith(f"{raised.value.field}: ")
    return raised.value


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_text_prompt_comes_in_either_form(shape):
    in_tensors = decoded(a_message(a_text(text="Größe", shape=shape)))
    beside = decoded(raw(("text_input", "BYTES", shape, packed("Größe".encode()))))

    assert in_tensors.request.prompt == beside.request.prompt == TextPrompt("Größe")
    assert (in_tensors.form.raw, beside.form.raw) == (False, True)
    assert in_tensors.form.batched == beside.form.batched == (shape == [1, 1])


@pytest.mark.parametrize(("datatype", "code"), [("INT32", "i"), ("INT64", "q"), ("UINT32", "I")])
def test_token_ids_come_in_three_types_and_either_form(datatype, code):
    ids = [0, 5, 2**31 - 1]
    for message in (
        a_message(a_tensor("input_ids", datatype, ids)),
        raw(("input_ids", datatype, [1, 3], struct.pack(f"<3{code}", *ids))),
    ):
        prompt = decoded(message).request.prompt
        assert isinstance(prompt, TokenPrompt)
        assert token_ids(prompt.tokens) == ids


def test_absent_parameters_have_the_public_defaults():
    inference = decoded(a_message(id="mine"))

    assert (inference.request.sampling.max_tokens, inference.request.sampling.temperature) == (16, 1.0)
    assert (inference.request.priority, inference.request.deadline, inference.stream) == (0, None, False)
    assert (inference.form.id, inference.form.outputs) == ("mine", ("text_output", "finish_reason"))


@pytest.mark.parametrize(
    ("triton", "ours"), [(0, 0), (1, 100), (2, 99), (101, 0), (201, -100)]
)  # fmt: skip
def test_priority_one_goes_first_as_with_triton(triton, ours):
    assert decoded(a_message(parameters={"priority": triton})).request.priority == ours


def test_the_earlier_deadline_counts():
    message = a_message(parameters={"timeout": 1_000_000})

    assert decoded(message).request.deadline == NOW + SECOND
    assert decoded(message, Nanos(NOW + 5)).request.deadline == NOW + 5
    assert decoded(message, Nanos(NOW + 5 * SECOND)).request.deadline == NOW + SECOND
    assert decoded(a_message(parameters={"timeout": 0})).request.deadline is None


@pytest.mark.parametrize("as_json", [False, True])
def test_sampling_parameters_come_as_text_or_json(as_json):
    if as_json:
        listed = '{"temperature": "0.5", "top_k": -1, "stop": ["a", "b"], "ignore_eos": "true", "seed": null, "n": "1"}'
        message = a_message(a_text(), a_text("sampling_parameters", listed))
    else:
        one_by_one = {"temperature": "0.5", "top_k": -1, "stop": "a", "ignore_eos": True, "n": 1}
        message = a_message(parameters=one_by_one)

    request = decoded(message).request

    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 0, None)
    assert request.sampling.ignore_eos
    assert request.stop == (("a", "b") if as_json else ("a",))


def test_seeds_may_be_negative_or_none():
    assert decoded(a_message(parameters={"seed": -1})).request.sampling.seed is None
    listed = a_message(a_text(), a_text("sampling_parameters", '{"seed": -2}'))
    assert decoded(listed).request.sampling.seed == 2**64 - 2
    far = a_message(a_text(), a_text("sampling_parameters", f'{{"seed": {2**64}}}'))
    assert refusal(far).field == "sampling_parameters.seed"


@pytest.mark.parametrize(
    ("message", "field", "said"),
    [
        (a_message(a_text(), a_text()), "text_input", "twice"),
        (a_message(a_text("prompt")), "inputs[0]", "'prompt' is not one of text_input"),
        (a_message(a_tensor("text_input", "INT32", [1])), "text_input", "must be BYTES, not 'INT32'"),
        (a_message(a_tensor("input_ids", "FP32", [1])), "input_ids", "must be INT32 or INT64 or UINT32"),
        (a_message(a_tensor("text_input", "BYTES", [b"a", b"b"])), "text_input", "[1] or [1, 1], not [2]"),
        (a_message(a_text(shape=[])), "text_input", "not []"),
        (a_message(a_text(shape=[1, 1, 1])), "text_input", "not [1, 1, 1]"),
        (a_message(a_text(shape=[1] * 1000)), "text_input", "[1, 1, 1, 1, 1, 1, 1, 1, …]"),
        (a_message(a_tensor("input_ids", "INT32", [1, 2], [2, 1])), "input_ids", "[n] or [1, n], not [2, 1]"),
        (a_message(a_tensor("input_ids", "INT32", [1, 2], [3])), "input_ids", "has 2 elements in int_contents"),
        (a_message(a_tensor("input_ids", "INT32", [], [-1])), "input_ids", "not [-1]"),
        (a_message(a_tensor("input_ids", "INT32", [1, -2])), "input_ids[1]", "-2 is no token id"),
        (a_message(a_tensor("input_ids", "INT64", [2**32])), "input_ids[0]", "4294967296 is no token id"),
        (a_message(a_text(), a_tensor("input_ids", "INT32", [1])), "input_ids", "second prompt"),
        (a_message(a_tensor("stream", "BOOL", [True])), "text_input", "is missing"),
        (a_message(a_text(), a_tensor("stream", "BOOL", [])), "stream", "not [0]"),
        (a_message(a_text(), a_tensor("exclude_input_in_output", "BOOL", [False])), "exclude_input_in_output", "true"),
        (a_message(a_tensor("text_input", "BYTES", [b"\xff"])), "text_input", "not valid UTF-8"),
        (a_message(a_text(), a_text("sampling_parameters", "{")), "sampling_parameters", "not valid JSON"),
        (a_message(a_text(), a_text("sampling_parameters", "[]")), "sampling_parameters", "expected `object`"),
        (a_message(a_text(), a_text("sampling_parameters", "[" * 10_000)), "sampling_parameters", ""),
        (a_message(a_text(), a_text("sampling_parameters", '{"top_p": "x"}')), "sampling_parameters.top_p", "float"),
        (a_message(a_text(), a_text("sampling_parameters", '{"best": 2}')), "sampling_parameters.best", "not a known"),
        (a_message(a_text(), a_text("sampling_parameters", '{"n": 2}')), "sampling_parameters.n", "only 1"),
        (a_message(a_text(), a_text("sampling_parameters", '{"seed":1}'), parameters={"seed": 1}), "seed", "once"),
        (a_message(parameters={"temprature": 1}), "temprature", "not a known parameter"),
        (a_message(parameters={"max_tokens": "many"}), "max_tokens", "expected `int"),
        (a_message(parameters={"ignore_eos": 7}), "ignore_eos", "expected `bool"),
        (a_message(parameters={"priority": -1}), "priority", ">= 0"),
        (a_message(parameters={"timeout": -1}), "timeout", ">= 0"),
        (a_message(parameters={"timeout": 2**62}), "timeout", "<= "),
        (a_message(parameters={"placement": "elsewhere"}), "placement", "invalid enum value"),
        (a_message(parameters={"sequence_id": 1, "session": "s"}), "sequence_id", "session"),
        (a_message(parameters={"sequence_id": 1.5}), "sequence_id", "number or a text"),
        (a_message(id="x" * (MAX_ID_CHARACTERS + 1)), "id", "257 characters"),
        (a_message(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="x")]), "outputs[0]", "'x' is not one"),
        (a_message(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="logprobs")]), "logprobs", "parameter"),
        (a_message(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="output_ids")] * 2), "outputs[1]", ""),
        (raw(("text_input", "BYTES", [1], b"\x05\0\0\0abc")), "text_input", "end within an element"),
        (raw(("text_input", "BYTES", [1], b"\x05\0")), "text_input", "end within an element"),
        (raw(("text_input", "BYTES", [1], packed(b"a") + packed(b"b"))), "text_input", "after its only element"),
        (raw(("input_ids", "INT32", [1], b"abc")), "input_ids", "3 raw bytes, and each element takes 4"),
        (raw(("input_ids", "INT32", [2], b"abcd")), "input_ids", "1 elements in raw_input_contents"),
        (a_message(raw_input_contents=[packed(b"a")]), "text_input", "use one of them"),
        (a_message(raw_input_contents=[b"", b""]), "raw_input_contents", "2 entries for 1 inputs"),
    ],
)  # fmt: skip
def test_wrong_field_is_rejected_by_name(message, field, said):
    refused = refusal(message)

    assert refused.reason is Reason.INVALID_ARGUMENT
    assert refused.field == field
    assert said in refused.message
    assert len(refused.message) < 300


def test_shared_memory_and_classification_are_refused_by_name():
    tensor = a_text()
    tensor.parameters["shared_memory_region"].string_param = "r"
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")
    output.parameters["classification"].int64_param = 1

    assert "'shared_memory_region'" in refusal(a_message(tensor)).message
    assert "'classification'" in refusal(a_message(outputs=[output])).message


def test_a_parameter_without_a_value_is_refused():
    message = a_message()
    message.parameters["seed"].SetInParent()

    assert refusal(message).field == "seed"


def test_there_is_one_version_of_a_model():
    assert decoded(a_message(model_version="1"))
    refused = refusal(a_message(model_version="2"))
    assert (refused.reason, refused.field) == (Reason.MODEL_NOT_FOUND, "model_version")


def test_outputs_have_the_prompts_shape_and_requested_order():
    asked = [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("output_ids", "text_output")]
    message = raw(("text_input", "BYTES", [1, 1], packed(b"once")))
    message.outputs.extend(asked)
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    part = KServePart(text="é", token_ids=[7, 8], finished=Finished(finish=Finish.STOP, usage=usage, kv=()))

    response = encode_part(part, decoded(message).form, RequestId("r1"), a_model_card().name, str)

    assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
        ("output_ids", "INT32", [1, 2]),
        ("text_output", "BYTES", [1, 1]),
    ]
    assert list(response.raw_output_contents) == [struct.pack("<2i", 7, 8), packed("é".encode())]
    assert response.parameters["cached_tokens"].int64_param == 1


def test_a_refusal_is_short_whatever_was_refused():
    refused = RequestRejected(Reason.INVALID_ARGUMENT, "x" * 10_000, field="text_input")

    sent = encode_refusal(refused, "i" * 10_000, "m" * 10_000)

    assert sent.ByteSize() < 1500
    assert sent.infer_response.parameters["error_field"].string_param == "text_input"


NAMES = st.sampled_from(
    ["text_input", "input_ids", "stream", "sampling_parameters", "exclude_input_in_output"]
) | st.text(max_size=4)
TENSORS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from([*FIELDS, "", "STRING"]),
    shape=st.lists(st.integers(-2, 3) | st.integers(-(2**63), 2**63 - 1), max_size=3),
    contents=st.builds(
        pb.InferTensorContents,
        bool_contents=st.lists(st.booleans(), max_size=2),
        int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
        int64_contents=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
        bytes_contents=st.lists(
            st.binary(max_size=8) | st.sampled_from([b"{}", b'{"seed":1}', b"[[", b"1"]), max_size=2
        ),
    )
    | st.none(),
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["temperature", "max_tokens", "stop", "timeout", "priority", "sequence_id", "kv_path", "seed"])
    | st.text(max_size=4),
    st.one_of(
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
        st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
        st.builds(pb.InferParameter, double_param=st.floats() | st.just(math.nan)),
        st.builds(pb.InferParameter, string_param=st.text(max_size=8)),
        st.just(pb.InferParameter()),
    ),
    max_size=3,
)


@given(
    st.builds(
        pb.ModelInferRequest,
        id=st.text(max_size=4),
        inputs=st.lists(TENSORS, max_size=3),
        parameters=PARAMETERS,
        raw_input_contents=st.lists(st.binary(max_size=12), max_size=2),
    )
)
def test_random_messages_decode_or_are_rejected_by_name(message):
    refused: RequestRejected | None = None
    try:
        inference = decoded(message)
    except RequestRejected as error:
        refused = error

    if refused is not None:
        assert refused.field
        assert len(refused.message) < 400
    else:
        assert isinstance(inference.request.prompt, TextPrompt | TokenPrompt)
        assert inference.request.model == ModelName("")
