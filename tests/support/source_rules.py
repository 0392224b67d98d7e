"""Source rules: checks of `make check` that ruff and import-linter do not make.

Rules:

1. A folder holds at most 15 files with code. Generated files and `__init__.py` do not count.
2. No docstring begins with a word that often begins a sentence fragment, such as "Of" or "Whether". A constant that a
docstring names in backquotes occurs in the code of its module; a constant of another module is named with that module.
3. The name of a test has at most 60 characters.
4. A class name occurs once in the product, unless the classes implement the same port (`SAME_PORT`).
5. Tests read and replace no private attribute of an object, and no private name of another module.
6. Tests, and the scripts in their strings, wait by the helpers of `tests/support/waiting.py` and never sleep themselves (`MAY_SLEEP`).
7. No byte from a connection or a file becomes code: the product uses nothing in `RUNS_CODE` and `PICKLING_METHODS`.
ruff's security rules refuse only some of these.
8. The product makes metrics only from definitions (`kvstore.metric_definitions`), because docs/metrics.md is made from the
definitions, too. So the product imports no class of prometheus_client that makes a metric (`MAKES_METRICS`).
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("fleet", "kvstore", "workers", "operators")
CODE = (*PRODUCT, "tests", "loadtests")
MAX_FILES = 15
MAX_TEST_NAME = 60
FRAGMENT = re.compile(r"(Of|Those|That|Who|What|As|See|Whether)\b")
CONSTANT = re.compile(r"(?<!`)`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)`(?!`)")
SAME_PORT = frozenset({"Captured", "_Captured"})
"""Class names that occur several times, because the classes implement the same port (rule 4)."""

PUBLIC = frozenset({"_asdict", "_fields", "_make", "_replace", "_exit", "_request_id"})
"""Names with an underscore that are public, because named tuples, `os` or `openai` document them."""

SLEEP = re.compile(r"\bsleep\(")
MAY_SLEEP = {
    Path("tests/support/waiting.py"): "the helpers by which all other tests wait",
    Path("tests/unit/sim/test_virtual_loop.py"): "it tests that sleeping takes virtual time",
    Path("tests/integration/local/misbehaving_child.py"): "a program that has to be slow and to hang",
}
"""Files of tests that may call `sleep`, each with the reason."""

RUNS_CODE = frozenset({
    "eval", "exec", "builtins.eval", "builtins.exec", "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "shelve",
    "multiprocessing.connection.Client", "multiprocessing.connection.Listener", "multiprocessing.managers", "torch.load", "numpy.load",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.Loader",
    "yaml.FullLoader", "yaml.UnsafeLoader", "xmlrpc",
})  # fmt: skip
"""Modules and functions that may run code that their input names. Process pools are allowed, because they pickle only within a program."""

PICKLING_METHODS = frozenset({"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"})
"""Methods of pyzmq's sockets that pickle or unpickle, or that call a given function on received bytes."""

MAKES_METRICS = frozenset({
    "Counter", "Gauge", "Histogram", "Summary", "Info", "Enum", "CounterMetricFamily", "GaugeMetricFamily", "HistogramMetricFamily",
    "SummaryMetricFamily", "InfoMetricFamily", "StateSetMetricFamily", "UnknownMetricFamily", "UntypedMetricFamily",
    "GaugeHistogramMetricFamily",
})  # fmt: skip
"""Classes of prometheus_client that make a metric."""

DEFINES_METRICS = Path("kvstore/metric_definitions.py")

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def source_files() -> list[Path]:
    """Return the Python and C files of the repository, except generated ones."""
    listed = subprocess.run(["git", "ls-files", "-z", *CODE], capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.split("\0") if name.endswith((".py", ".c"))]
    return [file for file in files if file.exists() and not file.stem.endswith(("_pb2", "_pb2_grpc"))]


def complaints(files: list[Path]) -> Iterator[str]:
    """Yield one line for each rule that a file or folder breaks."""
    folders = Counter(file.parent for file in files if file.name != "__init__.py")
    for folder, count in sorted(folders.items()):
        if count > MAX_FILES:
            yield f"{folder}: {count} files; make sub-folders of at most {MAX_FILES} files"
    classes: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.suffix == ".py":
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
            yield from _of_file(file, tree)
            if file.parts[0] == "tests" and file not in MAY_SLEEP:
                for number, line in enumerate(text.splitlines(), 1):
                    if SLEEP.search(line):
                        yield f"{file}:{number}: a test does not sleep; wait for a condition, or use `pace` of tests/support/waiting.py"
            if file.parts[0] in PRODUCT:
                yield from _running_code(file, tree)
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        classes[node.name].append(f"{file}:{node.lineno}")
    for name, places in sorted(classes.items()):
        if len(places) > 1 and name not in SAME_PORT:
            yield f"{places[0]}: class {name} is defined {len(places)} times, also at {', '.join(places[1:])}"


def _of_file(file: Path, tree: ast.Module) -> Iterator[str]:
    yield from _unknown_constants(file, tree)
    if file.parts[0] in PRODUCT and file != DEFINES_METRICS:
        yield from _undefined_metrics(file, tree)
    for node in ast.walk(tree):
        if file.parts[0] == "tests" and (name := _private_name(node)):
            yield f"{file}:{getattr(node, 'lineno', 1)}: {name} is private; give the product a public view, or test what it does"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if first := FRAGMENT.match(node.value.value.strip()):
                yield f"{file}:{node.lineno}: the docstring begins with {first.group()!r}; write a whole sentence"
            continue
        if not isinstance(node, Definition):
            continue
        line = getattr(node, "lineno", 1)
        name = getattr(node, "name", "")
        is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name.startswith("test_")
        if is_test and len(name) > MAX_TEST_NAME:
            yield f"{file}:{line}: {name} has {len(name)} characters; a test name has at most {MAX_TEST_NAME}"


def _unknown_constants(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yield one line for each constant in a docstring that the code of the module does not have (rule 2)."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    known: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                known.add(name)
            case ast.Constant(value=str(text)) if node not in docstrings:
                known.update(re.findall(r"\w+", text))
    for docstring in sorted(docstrings, key=lambda each: each.lineno):
        if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str):
            for name in CONSTANT.findall(docstring.value):
                if name not in known:
                    yield f"{file}:{docstring.lineno}: {name} is no name in this module; correct it, or name the module that has it"


def _undefined_metrics(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yield one line for each import of a class that makes a metric without a definition (rule 8)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(each.name.startswith("prometheus_client") for each in names):
                yield f"{file}:{node.lineno}: import the names that are needed from prometheus_client, so that makers of metrics are seen"
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("prometheus_client"):
                for name in sorted({each.name for each in names} & MAKES_METRICS):
                    yield f"{file}:{node.lineno}: {name} makes a metric without a definition; use {DEFINES_METRICS}"
            case _:
                pass


def _running_code(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yield one line for each use of a function or method that may run code from its input (rule 7)."""
    modules: dict[str, str] = {}  # full names by the names under which the module imports them
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules |= {each.asname or each.name: each.name for each in names}
                used += [(node.lineno, each.name) for each in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules |= {each.asname or each.name: f"{module}.{each.name}" for each in names}
                used += [(node.lineno, f"{module}.{each.name}") for each in names]
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=method) if method in PICKLING_METHODS:
                yield _runs_code(file, node.lineno, method)
            case ast.Attribute():
                first, _, rest = ast.unparse(node).partition(".")
                used.append((node.lineno, f"{modules.get(first, first)}.{rest}"))
            case ast.Call(func=ast.Name(id=name)):
                used.append((node.lineno, modules.get(name, name)))
            case _:
                pass
    for line, name in sorted(set(used)):
        parts = name.split(".")
        if not RUNS_CODE.isdisjoint(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            yield _runs_code(file, line, name)


def _runs_code(file: Path, line: int, name: str) -> str:
    return f"{file}:{line}: {name} makes code of what it reads; use msgspec, protobuf or safetensors"


def _private_name(node: ast.AST) -> str:
    """Return the private name that a node uses of another object or module; empty if there is none (rule 5)."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
            return ""
        case ast.Attribute(attr=name):
            found = [name]
        case ast.ImportFrom(names=names):
            found = [each.name for each in names]
        case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_]):
            found = [name]
        case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
            found = [name]
        case _:
            return ""
    return next((each for each in found if re.match(r"_[a-z]", each) and each not in PUBLIC), "")


def main() -> int:
    """Print the complaints, and return the exit status."""
    wrong = list(complaints(source_files()))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
