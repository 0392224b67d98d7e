"""Builder of the images: `python deploy/images/build.py --registry R router operator`, with Docker or what takes its commands.

Each image is built from the project's root with its version and revision as labels. An image that has more megabytes
beyond its base than `budgets.toml` allows ends the command with status 1.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = Path("deploy/images")
MEGABYTE = 1_000_000


def main() -> int:
    """Build the images that the command names."""
    budgets = tomllib.loads((ROOT / IMAGES / "budgets.toml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(prog="python deploy/images/build.py", description="Build Fleet's images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(budgets)}; none: all")
    parser.add_argument("--registry", default="", help="prefix of the names, such as registry.example.org/llm")
    parser.add_argument("--tag", default=version, help="tag and version of the images (%(default)s)")
    parser.add_argument("--runtime", default="docker", help="docker, podman or what else takes these commands")
    given = parser.parse_args()
    if unknown := sorted(set(given.images) - budgets.keys()):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(budgets)}")
    too_large = []
    for image in given.images or budgets:
        name = f"{given.registry.rstrip('/')}/fleet-{image}:{given.tag}".lstrip("/")
        _build(given.runtime, image, name, given.tag)
        size = (_size(given.runtime, name) - _size(given.runtime, _base(image))) // MEGABYTE
        print(f"{name}: {size} MB beyond its base, of {budgets[image]}", file=sys.stderr)
        if size > budgets[image]:
            too_large.append(name)
    if too_large:
        print(f"{', '.join(too_large)}: over the budget in {IMAGES / 'budgets.toml'}", file=sys.stderr)
    return 1 if too_large else 0


def _build(runtime: str, image: str, name: str, version: str) -> None:
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    arguments = [f"--build-arg=VERSION={version}", f"--build-arg=REVISION={revision or 'unknown'}"]
    file = f"--file={IMAGES / image}.Dockerfile"
    subprocess.run([runtime, "build", file, *arguments, f"--tag={name}", "."], cwd=ROOT, check=True)


def _base(image: str) -> str:
    """Return the base image that a Dockerfile names."""
    lines = (ROOT / IMAGES / f"{image}.Dockerfile").read_text().splitlines()
    return next(line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE="))


def _size(runtime: str, name: str) -> int:
    """Return the size of an image in bytes."""
    command = [runtime, "image", "inspect", name]
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]["Size"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        sys.exit(f"build.py: {error.filename}: not found; --runtime names a container runtime")
    except subprocess.CalledProcessError as error:
        sys.exit(f"build.py: {' '.join(map(str, error.cmd[:3]))} … ended with status {error.returncode}")
