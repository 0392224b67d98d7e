"""Blocks of the README and the documents, with the comments in the source of a page that say how a block is tested.

Rules:

1. Each fenced block is a test. A comment on the line before it, `<!-- docs-test: CLAUSE; CLAUSE -->`, says how it is
   tested.
2. Blocks of commands and Python need no comment: they run in the order of the page (`shell_session`). YAML needs no comment
either: the tests of Kubernetes apply it. Every other block has a comment.
3. A block that no test can run has `skip, REASON`, with one of `SKIP_REASONS`.
4. The comment `cluster` belongs to no block, and is a step of its own: it starts a cluster for the rest of the page.

`missing_paths` checks the paths that a page names.
"""

import re
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

SKIP_REASONS = frozenset(
    {
        "is a diagram",
        "shows the form only",
        "differs from run to run",
        "installs packages",
        "downloads a model or data",
        "builds images",
        "runs the tests",
        "takes minutes",
        "has a test of its own",
        "needs a GPU",
        "needs nodes and pods of a real cluster",
        "needs servers that are not part of Fleet",
    }
)

LANGUAGES = frozenset({"sh", "python", "toml", "yaml", "json", "text"})

CLAUSES = frozenset({"skip", "settings", "file", "background", "until", "kube", "output", "needs", "cluster"})
"""Clauses that a comment in a document may have.

skip, REASON: no test runs the block. settings KIND: the block loads as settings of that kind. file PATH: the block is that file.
background: each command of the block keeps running until the page ends. until TEXT: wait until this regular expression matches the
output, and repeat a command that ends before. kube: the tests of Kubernetes run the commands. output: the block is the output of the
commands before it. needs PACKAGE: the block runs only if this package is installed. cluster: start a cluster here, with these options.
"""

_COMMENT = re.compile(r"^<!-- docs-test: (?P<clauses>.*?) -->$")
_FENCE = re.compile(r"^```(?P<language>\S*)$")


class Block(NamedTuple):
    """Holds a fenced block, or the step of a `cluster` comment, which has no block."""

    page: Path
    line: int
    language: str
    """Empty for a comment without a block."""

    text: str
    clauses: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order.

    Raises:
        ValueError: A block has no end mark.
    """
    found: list[Block] = []
    said: tuple[int, dict[str, str]] | None = None
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        if comment := _COMMENT.match(line.strip()):
            said = number, _clauses(comment["clauses"])
            if "cluster" in said[1]:
                found.append(Block(page, number, "", "", said[1]))
                said = None
        elif fence := _FENCE.match(line.strip()):
            inner: list[str] = []
            for _, each in lines:
                if each.strip() == "```":
                    break
                inner.append(each)
            else:
                raise ValueError(f"{page}:{number}: the block does not end")
            text = textwrap.dedent("\n".join(inner) + "\n")
            found.append(Block(page, number, fence["language"], text, said[1] if said else {}))
            said = None
        elif said:
            raise ValueError(f"{page}:{said[0]}: no block follows the comment")
    return found


def _clauses(text: str) -> dict[str, str]:
    parts = (each.strip() for each in text.split(";"))
    return {verb.rstrip(","): rest.strip() for verb, _, rest in (each.partition(" ") for each in parts)}


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def complaint(block: Block) -> str:
    """Return what is wrong with the comment of a block: empty if the block is tested, or skipped for a known reason."""
    clauses = block.clauses
    if unknown := block.clauses.keys() - CLAUSES:
        return f"{', '.join(sorted(unknown))}: no such clause; tests/support/documents.py lists them"
    if "skip" in clauses:
        return "" if clauses["skip"] in SKIP_REASONS else f"{clauses['skip']!r} is not one of SKIP_REASONS"
    match block.language:
        case "" if "cluster" in clauses:
            return ""
        case "sh" | "python" | "yaml":
            return ""
        case "toml" | "json":
            return "" if clauses.keys() & {"settings", "file"} else "say of what these are settings: `settings KIND`"
        case "text":
            return "" if "output" in clauses else "say `output`, or `skip` with a reason"
    return f"{block.language!r} is not one of {', '.join(sorted(LANGUAGES))}"


EVERYWHERE = frozenset({"machine.py", "server.py", "ports.py", "messages.py"})
"""File names for which a page need not name the folder, because they mean the files of this name in several folders."""

_PATH = re.compile(r"(?![./])[\w.*-]+(/[\w.*-]+)*/?")
_FILE = re.compile(r"\w+\.(py|md|toml|proto|c)")


def missing_paths(page: Path) -> list[str]:
    """Return the paths in backquotes and in links that a page names and the repository does not have.

    A path may begin at the root, or at a folder of a path that the same table row or paragraph has named before. `NAME`
    stands for a name that the reader chooses, so only the folder before it has to exist. `*` stands for any name.
    """
    missing = []
    folders: set[Path] = set()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("|"):
            folders = set()
        for name in _paths_in(line):
            found = _found(name, {Path(), page.parent.relative_to(ROOT), *folders})
            if found is None and name not in EVERYWHERE:
                missing.append(f"{page.relative_to(ROOT)}:{number}: {name}")
            elif found is not None:
                folders |= {found, *found.parents}
    return missing


def _paths_in(line: str) -> Iterator[str]:
    for text in re.findall(r"`([^`]+)`|\]\(([^):#]+)", line):
        for word in "".join(text).split():
            name = word.rpartition("=")[2]
            if _PATH.fullmatch(name) and ("/" in name or _FILE.fullmatch(name)):
                yield name


def _found(name: str, folders: set[Path]) -> Path | None:
    if "*" in name:
        return next((path for path in _tracked() if path.match(name)), None)
    whole = Path(name)
    chosen = next((place for place, part in enumerate(whole.parts) if "NAME" in part), len(whole.parts))
    fixed = Path(*whole.parts[:chosen])
    return next((folder / fixed for folder in sorted(folders) if folder / fixed in _tracked()), None)


@cache
def _tracked() -> frozenset[Path]:
    """Return the paths of all files of the repository that git tracks, and of their folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()]
    return frozenset({*files, *(folder for file in files for folder in file.parents)})
