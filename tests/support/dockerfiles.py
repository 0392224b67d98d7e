"""Dockerfiles: reads them, and runs their steps without a container runtime.

This machine's root folder takes the place of the base image. Each stage has an overlay over it, whose layer contains the
files that the steps write. A folder that a stage copies from another stage, and does not change afterwards, is mounted
read-only instead of copied, because a copy of a worker's packages would take gigabytes of memory.
"""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))

STEPS = """
set -e
mount -t tmpfs layers {folder}
{stages}
"""
STAGE = """
mkdir -p {folder}/{name}/root {folder}/{name}/upper {folder}/{name}/work
mount -t overlay {name} -o lowerdir=/,upperdir={folder}/{name}/upper,workdir={folder}/{name}/work {folder}/{name}/root
cd {folder}/{name}/root
for each in proc dev; do mount --rbind /$each $each; done
mount -t tmpfs scratch tmp
chmod o+x root   # where this machine's Python may be, which the image's own user has to reach
{steps}
"""
BASE = """
mkdir -p opt/base {folder}/{name}/base-upper {folder}/{name}/base-work
mount -t overlay base -o lowerdir={environment},upperdir={folder}/{name}/base-upper,workdir={folder}/{name}/base-work opt/base
"""


class PythonBase(msgspec.Struct, frozen=True):
    """Names a virtual environment that takes the place of a base image's packages; all stages have it at /opt/base."""

    environment: Path
    prepare: str
    """A command that runs before the steps of the last stage."""


class Instruction(msgspec.Struct, frozen=True):
    """Holds one instruction of a Dockerfile."""

    name: str
    text: str


def instructions(path: Path) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile, without comments. An instruction over several lines is yielded as one line."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = line.partition(" ")
        yield Instruction(name, text.strip())


def stages(path: Path) -> list[tuple[str, list[Instruction]]]:
    """Return the name and the instructions of each stage; instructions before the first stage are left out."""
    found: list[tuple[str, list[Instruction]]] = []
    for each in instructions(path):
        if each.name == "FROM":
            _, _, name = each.text.partition(" AS ")
            found.append((name, []))
        elif found:
            found[-1][1].append(each)
    return found


def ignored(path: str) -> bool:
    """Return whether .dockerignore leaves a file out; if several lines match, the last one decides."""
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


def run_steps(path: Path, folder: Path, last: str, seconds: float, base: PythonBase | None = None) -> str:
    """Run all steps of a Dockerfile, then a command as the user of the last stage; return the command's output.

    Args:
        path: The Dockerfile.
        folder: An empty folder; while the steps run, the layers are mounted there, in memory.
        last: The command; `{command}` in it stands for the command that a container of the image runs.
        seconds: Time limit for all steps and the command together.
        base: The packages of the base image; None: the packages of this machine.

    Raises:
        AssertionError: A step failed; the message ends with its output.
    """
    context = folder / "context"
    _copy_context(path, context)
    made = folder / "made"
    made.mkdir()
    found = [_stage(name or "final", steps, made, context, "" if name else last, base) for name, steps in stages(path)]
    script = STEPS.format(folder=made, stages="\n".join(found))
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{path.name}: {done.stderr[-2000:]}"
    return done.stdout.rpartition("=== last\n")[2]


def _copy_context(path: Path, context: Path) -> None:
    """Copy the files that the Dockerfile copies, without build results; check that .dockerignore leaves none of them out."""

    def left_out(_folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__" or name.endswith(".so")]

    for _, steps in stages(path):
        for each in steps:
            if each.name == "COPY" and not each.text.startswith("--from="):
                for source in each.text.split()[:-1]:
                    assert not ignored(source), source
                    target = context / source
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if (ROOT / source).is_dir():
                        shutil.copytree(ROOT / source, target, ignore=left_out, dirs_exist_ok=True)
                    else:
                        shutil.copyfile(ROOT / source, target)


def _stage(name: str, steps: list[Instruction], folder: Path, context: Path, last: str, base: PythonBase | None) -> str:
    """Return the shell commands of one stage, which end with the command `last`."""
    lines, workdir, variables, user = [], "/", {"PATH": "$PATH"}, "0:0"
    process: dict[str, list[str]] = {}
    if base is not None:
        variables = {"PATH": "/opt/base/bin:$PATH"}
        lines.append(BASE.format(folder=folder, name=name, environment=base.environment))
        if last:
            lines.append(_in_root(base.prepare, "/", variables, user))
    for at, each in enumerate(steps):
        match each.name:
            case "WORKDIR":
                workdir = each.text
                lines.append(f"mkdir -p .{workdir}")
            case "COPY":
                *sources, target = each.text.split()
                into = f".{target}" if target.startswith("/") else f".{workdir}/{target}"
                if sources[0].startswith("--from="):
                    whence = f"{folder}/{sources.pop(0).removeprefix('--from=')}/root"
                    if not any(target in later.text for later in steps[at + 1 :] if later.name == "RUN"):
                        [source] = sources
                        lines += [f"mkdir -p {into}", f"mount --bind -o ro {whence}{source} {into}"]
                        continue
                else:
                    whence = str(context)
                for source in sources:
                    place = f"{into}/{Path(source).name}" if target.endswith("/") else into
                    lines += [f"mkdir -p $(dirname {place})", f"cp -a {whence}/{source.lstrip('/')} {place}"]
            case "ENV":
                variables |= dict(part.split("=", 1) for part in each.text.split())
            case "RUN":
                lines.append(_in_root(each.text, workdir, variables, user))
            case "USER":
                user = each.text
            case "ENTRYPOINT" | "CMD":
                process[each.name] = json.loads(each.text)
    if last:
        command = shlex.join([*process.get("ENTRYPOINT", ()), *process.get("CMD", ())])
        lines += ['echo "=== last"', _in_root(last.replace("{command}", command), workdir, variables, user)]
    return STAGE.format(folder=folder, name=name, steps="\n".join(lines))


def _in_root(command: str, workdir: str, variables: dict[str, str], user: str) -> str:
    told = " ".join(f'{name}="{value}"' for name, value in variables.items())
    inside = shlex.quote(f"cd {workdir} && {command}")
    return f"env {told} chroot --userspec={user} . sh -c {inside}"


def sizes_in_megabytes() -> dict[str, int]:
    """Return the size limit of each image in MB, without its base image, by the name of the image."""
    found = re.findall(r"^([\w-]+) = (\d+)", (ROOT / "deploy" / "images" / "budgets.toml").read_text(), re.MULTILINE)
    return {name: int(size) for name, size in found}
