"""Builder of the images: `python deploy/images/build.py --registry R router operator`, with Docker or what takes its commands.

Each image is built from the project's root with its version and revision as labels, on its base image by digest. The digests are in
`bases.lock`. A base without one is pulled by its tag once, and its digest is added there; `--pin` does this anew for all. An image that has
more megabytes beyond its base than `budgets.toml` allows ends the command with status 1.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGES = Path("deploy/images")
MEGABYTE = 1_000_000
OCI = "org.opencontainers.image"
HEADER = "# Digests of the base images that the Dockerfiles name, one a line: NAME:TAG sha256:DIGEST. Made by deploy/images/build.py --pin.\n"


def main() -> int:
    """Build the images that the command names."""
    budgets = tomllib.loads((ROOT / IMAGES / "budgets.toml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(prog="python deploy/images/build.py", description="Build Fleet's images.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(budgets)}; none: all")
    parser.add_argument("--registry", default="", help="prefix of the names, such as registry.example.org/llm")
    parser.add_argument("--tag", default=version, help="tag and version of the images (%(default)s)")
    parser.add_argument("--runtime", default="docker", help="docker, podman or what else takes these commands")
    parser.add_argument("--lock", type=Path, default=ROOT / IMAGES / "bases.lock", help="digests of base images")
    parser.add_argument("--pin", action="store_true", help="look up the digests of the base images anew, build nothing")
    given = parser.parse_args()
    if unknown := sorted(set(given.images) - budgets.keys()):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(budgets)}")
    images = given.images or list(budgets)
    digests = _pinned(given.runtime, given.lock, sorted({_base(each) for each in images}), anew=given.pin)
    if given.pin:
        return 0
    too_large = []
    for image in images:
        name = f"{given.registry.rstrip('/')}/fleet-{image}:{given.tag}".lstrip("/")
        base, digest = _base(image), digests[_base(image)]
        pinned = f"{base.rpartition(':')[0]}@{digest}"
        _build(given.runtime, image, name, given.tag, pinned, {"base.name": base, "base.digest": digest})
        size = (_inspected(given.runtime, name)["Size"] - _inspected(given.runtime, pinned)["Size"]) // MEGABYTE
        print(f"{name}: {size} MB beyond its base, of {budgets[image]}", file=sys.stderr)
        if size > budgets[image]:
            too_large.append(name)
    if too_large:
        print(f"{', '.join(too_large)}: over the budget in {IMAGES / 'budgets.toml'}", file=sys.stderr)
    return 1 if too_large else 0


def _pinned(runtime: str, lock: Path, bases: list[str], *, anew: bool) -> dict[str, str]:
    """Return the digests of base images, and add to the lock those that it lacks; `anew`: look up all of them."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    known = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    missing = [base for base in bases if anew or base not in known]
    for base in missing:
        subprocess.run([runtime, "pull", base], check=True, stdout=sys.stderr)
        references = _inspected(runtime, base).get("RepoDigests") or ()
        found = next((digest for each in references if (digest := each.partition("@")[2]).startswith("sha256:")), None)
        if found is None:
            sys.exit(f"build.py: {runtime} knows no digest of {base}; write the line '{base} sha256:…' into {lock}")
        known[base] = found
    if missing:
        lock.write_text(HEADER + "".join(f"{base} {digest}\n" for base, digest in sorted(known.items())))
        print(
            f"{lock}: pinned {', '.join(missing)}; commit it, so that later builds have the same bases", file=sys.stderr
        )
    return known


def _build(runtime: str, image: str, name: str, version: str, base: str, labels: dict[str, str]) -> None:
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    arguments = {"BASE": base, "VERSION": version, "REVISION": revision or "unknown"}
    command = [runtime, "build", f"--file={IMAGES / image}.Dockerfile"]
    command += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    command += [f"--label={OCI}.{key}={value}" for key, value in labels.items()]
    subprocess.run([*command, f"--tag={name}", "."], cwd=ROOT, check=True)


def _base(image: str) -> str:
    """Return the base image that a Dockerfile names."""
    lines = (ROOT / IMAGES / f"{image}.Dockerfile").read_text().splitlines()
    return next(line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE="))


def _inspected(runtime: str, name: str) -> dict[str, Any]:
    """Return what the runtime knows of an image, among it its size in bytes."""
    command = [runtime, "image", "inspect", name]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        sys.exit(f"build.py: {error.filename}: not found; --runtime names a container runtime")
    except subprocess.CalledProcessError as error:
        sys.exit(f"build.py: {' '.join(map(str, error.cmd[:3]))} … ended with status {error.returncode}")
