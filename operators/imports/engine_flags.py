"""Engine flags: converts the command lines of vLLM, SGLang and Dynamo to settings and arguments of Fleet's workers.

Rules:

1. Flags that become fields of the deployment (model, parallelism, role) are not passed to the worker. Flags for ports,
   KV events and other things that Fleet's workers set themselves are dropped. All other flags become `--set` arguments of
   the worker's command: some set a setting of the worker (SETTINGS), and the others go to the engine unchanged
   (`vllm.extra_args`). The flag `no-x` becomes `x` with the value false.
2. Flags whose value is a JSON object or list cannot be passed on the worker's command line; a note names them. Flags with
   names that look like names of secrets are not passed on either, because anybody who may look at a pod can read its
   arguments.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from operators.api.disagg_deployment import Parallelism
from operators.imports.document_reader import Note
from operators.imports.secret_names import is_secret

SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
SHELL_FLAGS = ("-c", "-lc", "-ec", "-e", "-x", "-ex", "-exc")
SHELL_SIGNS = ("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>")
PROGRAMS = ("python3", "python", "vllm")

ALIASES = {
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dp-size": "data-parallel-size",
    "ep": "expert-parallel-size",
    "ep-size": "expert-parallel-size",
    "model-path": "model",
    "model-name": "served-model-name",
    "context-length": "max-model-len",
    "mem-fraction-static": "gpu-memory-utilization",
    "max-running-requests": "max-num-seqs",
}
"""Alternative names of flags in vLLM, SGLang and Dynamo, each with the name that vLLM uses."""

OURS = frozenset(
    {
        "host",
        "port",
        "http-port",
        "api-key",
        "disable-log-requests",
        "disable-log-stats",
        "enable-log-requests",
        "is-prefill-worker",
        "is-decode-worker",
        "disaggregation-mode",
        "disaggregation-transfer-backend",
        "disaggregation-bootstrap-port",
        "distributed-executor-backend",
        "kv-transfer-config",
        "kv-events-config",
        "connector",
        "block-size",
        "page-size",
        "skip-tokenizer-init",
        "durable-kv-events",
        "m",
    }
)
"""Flags that are dropped, because Fleet's workers themselves decide what these flags would set."""

SETTINGS = {"max-model-len": "max_model_len", "max-num-seqs": "max_running", "dtype": "vllm.dtype"}
"""Flags that become settings of Fleet's worker, each with the name of its setting."""

HUB_TOKENS = ("hf-token", "token")
"""Flags whose value is the access token for the model's repository."""

_NUMBER = re.compile(r"^-[0-9.]+$")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$\((\w+)\)|\$(\w+)")


class Flags(Struct, frozen=True):
    """Holds a parsed command line of an engine."""

    words: tuple[str, ...]
    """Words of the command line that are neither flags nor values of flags, such as ``python3`` or ``dynamo.vllm``."""

    named: Mapping[str, str]
    """Value of each flag, by the name that the flag has in vLLM, without leading dashes. It is ``true`` for a flag without a
    value. Several values of a flag are joined by spaces."""

    @property
    def model(self) -> str:
        """The repository or folder of the model; empty if the command line names no model."""
        if "serve" in self.words[:-1]:  # the command line is `vllm serve MODEL`
            return self.get("model") or self.words[self.words.index("serve") + 1]
        return self.get("model")

    def get(self, name: str) -> str:
        return self.named.get(name, "")

    def runs(self, module: str) -> bool:
        """Return whether the command line starts the Python module of this name."""
        return any(word == module or word.endswith(f"/{module}") for word in self.words) or self.get("m") == module


def flags_of(command: Sequence[str], args: Sequence[str], variables: Mapping[str, str]) -> Flags:
    """Parse a container's command and arguments.

    References to environment variables, such as ``$NAME``, are replaced by the values in `variables`. A reference to an
    unknown variable stays.
    """
    tokens = [*command, *args]
    if command and command[0] in SHELLS:
        tokens = _started(part for line in tokens[1:] if line not in SHELL_FLAGS for part in _split(line))
    expanded = [
        _VARIABLE.sub(lambda found: variables.get(found[1] or found[2] or found[3], found[0]), token)
        for token in tokens
    ]
    words: list[str] = []
    named: dict[str, str] = {}
    name = ""
    for word in expanded:
        if word.startswith("-") and not _NUMBER.match(word):
            flag, equals, value = word.lstrip("-").partition("=")
            name = ALIASES.get(flag.replace("_", "-"), flag.replace("_", "-"))
            if name:
                named[name] = value if equals else "true"
            name = "" if equals else name
        elif name:
            named[name] = word if named[name] == "true" else f"{named[name]} {word}"
        else:
            words.append(word)
    return Flags(tuple(words), named)


def _started(words: Iterable[str]) -> list[str]:
    """Return the words of the last program in a shell command line, without pipes and redirections after it.

    If the line contains none of PROGRAMS, begin at its first word.
    """
    tokens = list(words)
    starts = [at for at, word in enumerate(tokens) if word.rpartition("/")[2] in PROGRAMS]
    tokens = tokens[starts[-1] :] if starts else tokens
    end = next((at for at, word in enumerate(tokens) if word in SHELL_SIGNS), len(tokens))
    return tokens[:end]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation mark is not closed
        return line.split()


def parallelism_of(flags: Flags, path: str, notes: list[Note]) -> Parallelism:
    """Return the parallelism of an engine, as its flags set it; a note reports each invalid flag."""
    tensor, pipeline, data, expert = (
        _degree(flags, f"{kind}-parallel-size", path, notes) for kind in ("tensor", "pipeline", "data", "expert")
    )
    if flags.get("enable-expert-parallel") == "true" and expert == 1:
        expert = tensor * data
    return Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert)


def _degree(flags: Flags, name: str, path: str, notes: list[Note]) -> int:
    value = flags.get(name)
    if not value:
        return 1
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= 1024):
        notes.append(Note(path, f"--{name}: is no number from 1 to 1024; taken as 1"))
        return 1
    return int(value)


TAKEN = frozenset(
    {f"{kind}-parallel-size" for kind in ("tensor", "pipeline", "data", "expert")}
    | {
        f"data-parallel-{what}"
        for what in ("address", "rpc-port", "size-local", "start-rank", "rank", "hybrid-lb", "external-lb")
    }
    | {
        "enable-expert-parallel",
        "model",
        "served-model-name",
        "nnodes",
        "node-rank",
        "master-addr",
        "master-port",
        "headless",
    }
)
"""Flags that are not passed to the worker, because fields of the deployment replace them, such as `nodesPerReplica` for ``nnodes``."""


def settings_of(flags: Mapping[str, str], path: str, notes: list[Note]) -> list[str]:
    """Return arguments of Fleet's worker with the effect of the flags that are neither in TAKEN nor in OURS.

    A flag that must not be passed on (rule 2) gets a note instead.
    """
    said: dict[str, str] = {}
    for name, value in flags.items():
        if name in TAKEN or name in OURS:
            continue
        if is_secret(name, value):
            better = (
                "name a Secret in model.tokenSecret" if name in HUB_TOKENS else "let a variable take it from a Secret"
            )
            notes.append(Note(path, f"--{name}: has a secret's name and is left out; {better}"))
        elif _carries_object(value):
            notes.append(
                Note(path, f"--{name}: carries an object, which cannot be passed on here; make it a file of the image")
            )
        elif name in SETTINGS:
            said[SETTINGS[name]] = value
        elif name == "enforce-eager":
            said["vllm.enforce_eager"] = value
        elif name.startswith("no-") and value == "true":
            said[f"vllm.extra_args.{_field(name.removeprefix('no-'))}"] = "false"
        else:
            said[f"vllm.extra_args.{_field(name)}"] = value
    return [part for name, value in said.items() for part in ("--set", f"{name}={value}")]


def _field(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


def _carries_object(value: str) -> bool:
    return value[:1] in ("{", "[")


def passed_on(flags: Mapping[str, str]) -> list[str]:
    """Return the names of the flags that the worker passes to its engine unchanged."""
    known = TAKEN | OURS | SETTINGS.keys() | {"enforce-eager"}
    return [
        name
        for name, value in flags.items()
        if name not in known and not is_secret(name, value) and not _carries_object(value)
    ]
