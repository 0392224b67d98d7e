"""Command of the conformance suite: runs it against one picker, and exits with 1 if a case fails."""

import argparse
import asyncio
import sys
from pathlib import Path

import grpc
import msgspec

from tests.kube.picker.client import PickerOptions
from tests.kube.picker.suite import ConformanceReport, run_suite


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m tests.kube.picker",
        description="Check that an endpoint picker keeps the endpoint picker protocol 1.0.",
    )
    add = parser.add_argument
    add("--address", required=True, metavar="HOST:PORT", help="the picker's ext_proc port")
    add("--model", default=PickerOptions().model, help="the model in requests (%(default)s)")
    add("--api-key-file", type=Path, help="file with a key that requests bear")
    add(
        "--endpoint",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="a ready endpoint of the pool; others are learned",
    )
    add("--overload", type=int, default=0, metavar="N", help="N requests at once are more than the picker can take")
    add("--empty", action="store_true", help="the pool has no ready endpoint: run the cases of that state")
    add("--seconds", type=float, default=PickerOptions().seconds, help="time limit of a case (%(default)s)")
    add("--ca", type=Path, help="certificates of the authority, for a picker with TLS")
    add("--server-name", default="", help="the name in the picker's certificate")
    add("--json", metavar="FILE", help="write the report there; - is standard output")
    given = parser.parse_args()
    options = PickerOptions(
        model=given.model,
        api_key=given.api_key_file.read_text().strip() if given.api_key_file else "",
        seconds=given.seconds,
        overload=given.overload,
    )
    credentials = grpc.ssl_channel_credentials(given.ca.read_bytes()) if given.ca else None
    report = asyncio.run(
        run_suite(
            given.address,
            options,
            endpoints=given.endpoint,
            empty=given.empty,
            credentials=credentials,
            server_name=given.server_name,
        )
    )
    _tell(report)
    if given.json:
        content = msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"
        sys.stdout.write(content) if given.json == "-" else Path(given.json).write_text(content)
    return 1 if report.failed else 0


def _tell(report: ConformanceReport) -> None:
    """Write the results for people to standard error."""
    for each in report.cases:
        print(f"{each.outcome:8}{each.name}{f': {each.detail}' if each.detail else ''}", file=sys.stderr)
    print(f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
