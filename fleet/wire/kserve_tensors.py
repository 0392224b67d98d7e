"""Tensors of the Open Inference Protocol: reads and writes them, and checks names, types and shapes.

The elements of a tensor are in one of two places: in the field of `contents` for the tensor's type, or in raw form in one list outside
of the tensors. In raw form, numbers are little-endian and follow each other directly, and the length of each text stands before the text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from fleet.core.errors import invalid
from fleet.v1 import kserve_pb2 as pb

LENGTH_BYTES = 4  # bytes of the length before each element of a raw tensor of type BYTES

_SHOWN_SIZES = 8
_SHOWN_CHARACTERS = 100

Elements = Sequence[Any]


class _Datatype(Struct, frozen=True):
    contents: str  # name of the field of InferTensorContents for this type
    numpy: str = ""  # numpy's name of the type for raw contents; empty: each element has its length before it


_DATATYPES: Mapping[str, _Datatype] = {
    "BOOL": _Datatype("bool_contents", "<u1"),
    "INT32": _Datatype("int_contents", "<i4"),
    "INT64": _Datatype("int64_contents", "<i8"),
    "UINT32": _Datatype("uint_contents", "<u4"),
    "BYTES": _Datatype("bytes_contents"),
}


class AcceptedTensor(Struct, frozen=True):
    """Says which types and sizes the tensor of one input or output may have."""

    datatypes: tuple[str, ...]
    any_size: bool = False  # False if the tensor must have exactly one element


class InputTensors:
    """Reads the inputs of a request by name."""

    def __init__(self, message: pb.ModelInferRequest, accepted: Mapping[str, AcceptedTensor]) -> None:
        """Decode all inputs of a request.

        Raises:
            RequestRejected: INVALID_ARGUMENT, with the name of the input that is not accepted.
        """
        self.raw = bool(message.raw_input_contents)
        self._elements: dict[str, Elements] = {}
        self._batched: set[str] = set()
        if self.raw and len(message.raw_input_contents) != len(message.inputs):
            raise invalid(
                "raw_input_contents",
                f"has {len(message.raw_input_contents)} entries for {len(message.inputs)} inputs; "
                "send one for each, or none",
            )
        for index, tensor in enumerate(message.inputs):
            name = tensor.name
            if name not in accepted:
                raise invalid(f"inputs[{index}]", f"{quoted(name)} is not one of {', '.join(accepted)}")
            if name in self._elements:
                raise invalid(name, "is there twice")
            raw = message.raw_input_contents[index] if self.raw else None
            self._elements[name] = _elements(tensor, raw, accepted[name])
            if len(tensor.shape) > 1:
                self._batched.add(name)

    def get(self, name: str) -> Elements | None:
        return self._elements.get(name)

    def batched(self, name: str) -> bool:
        """Return True if the shape of an input begins with a batch dimension of 1."""
        return name in self._batched

    def text(self, name: str) -> str | None:
        """Return the only element of a text input as text; None if the request does not have this input.

        Raises:
            RequestRejected: The element is not UTF-8.
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


def add_tensor(
    response: pb.ModelInferResponse, name: str, datatype: str, elements: Elements, *, raw: bool, batched: bool
) -> None:
    """Add a tensor with one row to a response.

    Args:
        response: The response, whose other tensors have the same form.
        name: Name of the output.
        datatype: Name of the type in the protocol.
        elements: The elements of the row.
        raw: True if the elements are written in raw form, apart from the tensor.
        batched: True if the shape begins with a batch dimension.
    """
    known = _DATATYPES[datatype]
    shape = [1, len(elements)] if batched else [len(elements)]
    tensor = response.outputs.add(name=name, datatype=datatype, shape=shape)
    if not raw:
        getattr(tensor.contents, known.contents).extend(elements)
    elif known.numpy:
        response.raw_output_contents.append(np.asarray(elements, known.numpy).tobytes())
    else:
        packed = b"".join(len(element).to_bytes(LENGTH_BYTES, "little") + element for element in elements)
        response.raw_output_contents.append(packed)


def quoted(text: str) -> str:
    """Quote a text of a client for an error message, and shorten it if it is long."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


def _elements(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None, accepted: AcceptedTensor) -> Elements:
    """Return the elements of a tensor, which are in `contents` or in raw form."""
    name, shape = tensor.name, tensor.shape
    if tensor.datatype not in accepted.datatypes:
        raise invalid(name, f"must be {' or '.join(accepted.datatypes)}, not {quoted(tensor.datatype)}")
    if tensor.parameters:
        raise invalid(name, f"{quoted(min(tensor.parameters))} is not a known parameter of an input")
    wanted = "[n] or [1, n]" if accepted.any_size else "[1] or [1, 1]"
    one_row = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
    if not one_row or shape[-1] < 0 or (shape[-1] != 1 and not accepted.any_size):
        raise invalid(name, f"must have the shape {wanted}, not {_shown(shape)}: a request has one prompt")
    datatype = _DATATYPES[tensor.datatype]
    elements: Elements
    if raw is None:
        elements, where = getattr(tensor.contents, datatype.contents), datatype.contents
    elif tensor.HasField("contents"):
        raise invalid(name, "has contents, and the request has raw_input_contents; use one of them")
    else:
        elements, where = _unpacked(name, raw, datatype), "raw_input_contents"
    if len(elements) != shape[-1]:
        raise invalid(name, f"has {len(elements)} elements in {where}, and its shape is {_shown(shape)}")
    return elements


def _unpacked(name: str, raw: bytes, datatype: _Datatype) -> Elements:
    """Return the elements from raw contents. Contents of type BYTES must have exactly one element."""
    if datatype.numpy:
        width = np.dtype(datatype.numpy).itemsize
        if len(raw) % width:
            raise invalid(name, f"has {len(raw)} raw bytes, and each element takes {width}")
        numbers: Elements = np.frombuffer(raw, datatype.numpy)  # type: ignore[assignment]  # behaves like a sequence
        return numbers
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < end:
        raise invalid(name, f"has {len(raw)} raw bytes, which end within an element; each has its length before it")
    if len(raw) > end:
        raise invalid(name, f"has {len(raw) - end} raw bytes after its only element")
    return [raw[LENGTH_BYTES:end]]


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:_SHOWN_SIZES]))}{', …' if len(shape) > _SHOWN_SIZES else ''}]"
