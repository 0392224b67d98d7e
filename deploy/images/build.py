"""Builder of the images: `python deploy/images/build.py --registry R router operator`, with Docker or what takes its commands.

Each image is built from the project's root with its version and revision as labels, on its base image by digest. The digests are in
`bases.lock`. A base without one is pulled by its tag once, with a warning, and its digest is added there. `--pin` looks up the present digests of
all bases at their registry, and `--check` says which ones the lock lacks; no container runtime is needed for either. An image that has more megabytes beyond its base than `budgets.toml` allows ends the
command with status 1.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from base_digests import LookupFailed, digest_among, look_up

ROOT = Path(__file__).parents[2]
IMAGES = Path("deploy/images")
MEGABYTE = 1_000_000
MISSING = 3
"""Exit status if the lock lacks a digest."""

OCI = "org.opencontainers.image"
HEADER = "# Digests of the base images that the Dockerfiles name, one a line: NAME:TAG sha256:DIGEST. Made by deploy/images/build.py --pin.\n"


def main() -> int:
    """Build the images that the command names."""
    budgets = tomllib.loads((ROOT / IMAGES / "budgets.toml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python deploy/images/build.py", description="Build Fleet's images."
    )
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(budgets)}; none: all")
    parser.add_argument("--registry", default="", help="prefix of the names, such as registry.example.org/llm")
    parser.add_argument("--tag", default=version, help="tag and version of the images (%(default)s)")
    parser.add_argument("--runtime", default="docker", help="docker, podman or what else takes these commands")
    parser.add_argument("--lock", type=Path, default=ROOT / IMAGES / "bases.lock", help="digests of base images")
    parser.add_argument("--pin", action="store_true", help="look up the digests of the base images anew, build nothing")
    parser.add_argument(
        "--check", action="store_true", help="end with status 3 if the lock lacks a digest, build nothing"
    )
    parser.add_argument(
        "--mirror", default="", metavar="URL", help="where --pin asks, in place of the images' own registries"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time limit of --pin for each base image (%(default)s)"
    )
    given = parser.parse_args()
    if unknown := sorted(set(given.images) - budgets.keys()):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(budgets)}")
    images = given.images or list(budgets)
    bases = sorted({_base(each) for each in images})
    if given.pin:
        _write_lock(given.lock, {base: look_up(base, mirror=given.mirror, seconds=given.seconds) for base in bases})
        return 0
    if given.check:
        return MISSING if _warn(given.lock, _unpinned(given.lock, bases)) else 0
    digests = _pinned(given.runtime, given.lock, bases)
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


def _pinned(runtime: str, lock: Path, bases: list[str]) -> dict[str, str]:
    """Return the digests of base images; those that the lock lacks are pulled by their tags, and added to it."""
    found = {}
    missing = _unpinned(lock, bases)
    _warn(lock, missing)
    for base in missing:
        subprocess.run([runtime, "pull", base], check=True, stdout=sys.stderr)
        # An image may have names of several repositories, such as a mirror's, and their digests need not be this one's.
        found[base] = digest_among(_inspected(runtime, base).get("RepoDigests") or (), base)
        if not found[base]:
            sys.exit(f"build.py: {runtime} knows no digest of {base}; write the line '{base} sha256:…' into {lock}")
    if found:
        _write_lock(lock, found)
    return _read_lock(lock)


def _unpinned(lock: Path, bases: list[str]) -> list[str]:
    """Return the base images whose digests the lock lacks."""
    known = _read_lock(lock)
    return [each for each in bases if each not in known]


def _warn(lock: Path, missing: list[str]) -> bool:
    """Warn of base images without a digest, and return whether there are any."""
    if missing:
        print(
            f"WARNING: NOT PINNED: {', '.join(missing)}: {lock} has no digest, so a build takes what the tag names at that moment."
            " Run 'make images PIN=1' where the registry can be reached, and commit the file.",
            file=sys.stderr,
        )
    return bool(missing)


def _read_lock(lock: Path) -> dict[str, str]:
    """Return the digests by base image."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def _write_lock(lock: Path, found: dict[str, str]) -> None:
    """Add digests to the lock, or replace them there."""
    lock.write_text(
        HEADER + "".join(f"{base} {digest}\n" for base, digest in sorted((_read_lock(lock) | found).items()))
    )
    print(f"{lock}: pinned {', '.join(found)}; commit it, so that later builds have the same bases", file=sys.stderr)


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
    except LookupFailed as error:
        sys.exit(f"build.py: {error}")
    except FileNotFoundError as error:
        sys.exit(f"build.py: {error.filename}: not found; --runtime names a container runtime")
    except subprocess.CalledProcessError as error:
        sys.exit(f"build.py: {' '.join(map(str, error.cmd[:3]))} … ended with status {error.returncode}")
