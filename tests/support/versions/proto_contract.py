"""Protobuf contract: the fields of all protobuf messages of the previous version of Fleet, in `proto/contract.json`.

As a command, this module writes this file. Run it when `previous_version.toml` gets another commit. Do not run it to make
a test pass: if a field has changed, the previous version reads it wrongly.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from tests.support.versions.previous_version import COMMIT, ROOT, previous_tree

PACKAGES = ("fleet.v1", "kvstore.v1")  # without KServe and Envoy, whose contracts belong to other projects
RECORD = ROOT / "proto" / "contract.json"
TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}

Contract = dict[str, Any]
"""Fields by number in each message, values in each enumeration, and methods of each service."""


def contract_of(protos: Path) -> Contract:
    """Return the contract of a folder of .proto files."""
    messages: dict[str, dict[str, str]] = {}
    enumerations: dict[str, dict[str, str]] = {}
    methods: dict[str, str] = {}
    compiled = _compiled(protos)
    pool = DescriptorPool()
    for file in compiled.file:
        pool.Add(file)
    for name in (file.name for file in compiled.file if file.package in PACKAGES):
        found = pool.FindFileByName(name)
        for message in found.message_types_by_name.values():
            _add(message, messages, enumerations)
        for enumeration in found.enum_types_by_name.values():
            enumerations[enumeration.full_name] = _values(enumeration)
        for service in found.services_by_name.values():
            for method in service.methods:
                asked = f"{_streamed(method.client_streaming)}{method.input_type.full_name}"
                methods[method.full_name] = (
                    f"{asked} -> {_streamed(method.server_streaming)}{method.output_type.full_name}"
                )
    return {"messages": messages, "enumerations": enumerations, "methods": methods}


def _compiled(protos: Path) -> FileDescriptorSet:
    files = [str(path.relative_to(protos)) for path in sorted(protos.rglob("*.proto"))]
    # protoc runs in another process, because its library and that of NIXL crash a process that loads both.
    compiler = [sys.executable, "-m", "grpc_tools.protoc"]
    with tempfile.NamedTemporaryFile() as output:
        arguments = [f"-I{protos}", "--include_imports", f"--descriptor_set_out={output.name}", *files]
        subprocess.run([*compiler, *arguments], check=True)
        return FileDescriptorSet.FromString(Path(output.name).read_bytes())


def breaks(recorded: Contract, present: Contract) -> list[str]:
    """Return a text for each part of the recorded contract that is missing or changed in the present contract.

    New fields, values and methods are allowed.
    """
    found: list[str] = []
    for kind in ("messages", "enumerations"):
        for name, members in recorded[kind].items():
            if name not in present[kind]:
                found.append(f"{name} has disappeared")
                continue
            for number, told in members.items():
                now = present[kind][name].get(number)
                if now is None:
                    found.append(f"{name}: {number} ({told}) has disappeared")
                elif now != told:
                    found.append(f"{name}: {number} was {told}, and is {now}")
    for name, told in recorded["methods"].items():
        if (now := present["methods"].get(name)) != told:
            found.append(f"{name} was {told}, and is {now or 'no more there'}")
    return found


def recorded_contract(path: Path = RECORD) -> Contract:
    """Return the contract of the previous version."""
    contract: Contract = json.loads(path.read_text())
    return contract


def _add(message: Descriptor, messages: dict[str, dict[str, str]], enumerations: dict[str, dict[str, str]]) -> None:
    messages[message.full_name] = {str(field.number): _field(field) for field in message.fields}
    for nested in message.nested_types:
        _add(nested, messages, enumerations)
    for enumeration in message.enum_types:
        enumerations[enumeration.full_name] = _values(enumeration)


def _field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    cardinality = "repeated " if field.is_repeated else "optional " if field.has_presence and kind is None else ""
    group = field.containing_oneof
    oneof = "" if group is None or group.name.startswith("_") else f" of {group.name}"
    return f"{cardinality}{TYPES[field.type] if kind is None else kind.full_name} {field.name}{oneof}"


def _values(enumeration: EnumDescriptor) -> dict[str, str]:
    return {str(value.number): value.name for value in enumeration.values}


def _streamed(streaming: bool) -> str:
    return "stream " if streaming else ""


if __name__ == "__main__":
    contract = {"commit": COMMIT, **contract_of(previous_tree() / "proto")}
    RECORD.write_text(json.dumps(contract, indent=1, sort_keys=True) + "\n")
    print(f"{RECORD}: {len(contract['messages'])} messages")
