"""Structured output: translates the rules for an answer's text from and to proto/fleet/v1/inference.proto."""

from typing import assert_never

from fleet.core.requests import (
    AnyObject,
    Choice,
    Grammar,
    JsonSchema,
    Pattern,
    StructuralTag,
    StructuredOutput,
    ToolCallForm,
)
from fleet.v1 import inference_pb2 as pb


def encode_structured_output(form: StructuredOutput) -> pb.Form:
    match form:
        case AnyObject():
            return pb.Form(json_object=True)
        case JsonSchema(schema=schema):
            return pb.Form(json_schema=schema)
        case Pattern(regex=regex):
            return pb.Form(regex=regex)
        case Grammar(text=text):
            return pb.Form(grammar=text)
        case Choice(strings=strings):
            return pb.Form(choice=pb.Choice(strings=strings))
        case StructuralTag(text=text):
            return pb.Form(structural_tag=text)
        case ToolCallForm():
            return pb.Form(tool_calls=True)
        case _:
            assert_never(form)


def decode_structured_output(message: pb.Form) -> StructuredOutput | None:
    """Decode a structured output without checks. Return None if it is empty, or if this version does not know its kind.

    If the result is None, the caller must reject the request, because the client asked for a restriction that this version cannot apply.
    """
    match message.WhichOneof("form"):
        case "json_object":
            return AnyObject() if message.json_object else None
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "regex":
            return Pattern(message.regex)
        case "grammar":
            return Grammar(message.grammar)
        case "choice":
            return Choice(tuple(message.choice.strings))
        case "structural_tag":
            return StructuralTag(message.structural_tag)
        case "tool_calls":
            return ToolCallForm() if message.tool_calls else None
        case None:
            return None
        case other:
            assert_never(other)
