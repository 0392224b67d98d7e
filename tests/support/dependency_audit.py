"""Dependency audit: compares every pinned version with the known vulnerabilities.

pip-audit queries an advisory service. It passes even if the service knows none of the packages. Therefore this module
first queries a release that is known to be vulnerable (`CANARY`), and then checks that each package has an answer.

Usage: ``python -m tests.support.dependency_audit``. Exit status: 0: every pinned version was audited, and has no
vulnerabilities except those in `ACCEPTED`; 1: a version has another vulnerability; 3: a version was not audited.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
LOCKS = ("constraints.txt", "constraints-kube.txt", "constraints-sbom.txt")
OSV = "https://api.osv.dev/v1/query"
CANARY = "jinja2==2.4.1"
"""A release with published vulnerabilities (CVE-2014-1402 and later ones)."""

# The local part of a version (`+cpu`) is left out, because no advisory contains it.
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([\w.!-]+)(\+[\w.]+)?")
NAME_PUNCTUATION = re.compile(r"[-_.]+")  # these characters are equivalent in package names
FEWEST_PINS = 20  # fewer pins than these mean that a file was not read
DEADLINE_S = 1800

ACCEPTED: dict[str, str] = {}
"""Ids of vulnerabilities that do not concern Fleet, and why."""

CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 3


class AuditFailed(Exception):
    """Raised if the advisory service did not answer for every package."""


class Vulnerability(Struct, frozen=True, kw_only=True):
    """Describes one vulnerability of a pinned version."""

    package: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed_in: tuple[str, ...]


def pinned(root: Path) -> list[str]:
    """Return every version that the project pins, as `name==version`, from the lock files, pyproject.toml and the Makefile."""
    lines = [line for name in LOCKS for line in (root / name).read_text().splitlines()]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines += project["dependencies"]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    lines += re.findall(r"^(?:TORCH|UV) := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    found = [each for each in map(PIN.match, map(str.strip, lines)) if each]
    return sorted({f"{NAME_PUNCTUATION.sub('-', each[1]).lower()}=={each[2]}" for each in found})


def audit(pins: Iterable[str], service: str, osv_url: str) -> list[Vulnerability]:
    """Return the vulnerabilities of pinned versions.

    Raises:
        AuditFailed: The service did not answer for every package.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-audit-") as folder:
        requirements = Path(folder) / "pins.txt"
        requirements.write_text("\n".join(pins))
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--disable-pip", "--no-deps",
             f"--cache-dir={folder}/cache", f"--requirement={requirements}", f"--vulnerability-service={service}", f"--osv-url={osv_url}"],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError) as error:
        raise AuditFailed(
            (done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"])[-1]
        ) from error
    if skipped := [each["skip_reason"] for each in packages if "skip_reason" in each]:
        raise AuditFailed(
            f"{len(skipped)} of {len(packages)} packages were skipped, the first one because: {skipped[0]}"
        )
    return [
        Vulnerability(
            package=each["name"],
            version=each["version"],
            id=found["id"],
            aliases=tuple(found["aliases"]),
            fixed_in=tuple(found["fix_versions"]),
        )
        for each in packages
        for found in each["vulns"]
    ]


def main() -> int:
    """Print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.dependency_audit", description=__doc__)
    parser.add_argument("--service", choices=("osv", "pypi"), default="osv", help="advisory service (%(default)s)")
    parser.add_argument("--osv-url", default=OSV, metavar="URL", help="address of an OSV service (%(default)s)")
    given = parser.parse_args()
    pins = pinned(ROOT)
    assert len(pins) > FEWEST_PINS, pins
    try:
        if not audit([CANARY], given.service, given.osv_url):
            raise AuditFailed(f"the service knows no vulnerability of {CANARY}, which has several")
        found = audit(pins, given.service, given.osv_url)
    except (AuditFailed, subprocess.TimeoutExpired) as error:
        print(f"NOT AUDITED: {len(pins)} pinned packages; {given.service}: {error}")
        return NOT_AUDITED
    open_ones = [each for each in found if not ACCEPTED.keys() & {each.id, *each.aliases}]
    for each in open_ones:
        names = ", ".join((each.id, *each.aliases))
        print(f"{each.package} {each.version}: {names}; fixed in {', '.join(each.fixed_in) or 'no version yet'}")
    print(
        f"{len(pins)} pinned packages audited: {len(open_ones)} vulnerabilities, {len(found) - len(open_ones)} accepted"
    )
    return VULNERABLE if open_ones else CLEAN


if __name__ == "__main__":
    sys.exit(main())
