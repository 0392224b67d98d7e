"""`fleet generate`: streams an answer from a running cluster."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.cli.console.address import add_address, add_tls, address_option, client_tls, describe_error
from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.console.seconds import seconds
from fleet.client import Client, DeadlineExceeded, FleetError, KvPath, Placement, Result
from fleet.core.errors import ConfigurationRefused, Reason

DEFAULT_TOKENS = 128


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text; - reads standard input")
    add_address(parser)
    add_tls(parser)
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key", default="", metavar="KEY", help="API key, if the cluster has tenants")
    keys.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key, which keeps it out of the process list"
    )
    parser.add_argument("--model", default="", help="one of several served models")
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"default: {DEFAULT_TOKENS}"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, which is greedy")
    parser.add_argument(
        "--placement", choices=[str(each) for each in Placement], default=str(Placement.AUTO), help="default: auto"
    )
    parser.add_argument("--kv-path", choices=[str(each) for each in KvPath], help="KV path, if disaggregated")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="for the whole answer")
    parser.add_argument(
        "--chat", action="store_true", help="send the text as a user's message, through the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole answer as one JSON object when it is complete"
    )


def run(arguments: argparse.Namespace) -> int:
    text = _standard_input() if arguments.prompt == "-" else arguments.prompt
    key = _key(arguments.api_key_file) if arguments.api_key_file else arguments.api_key
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationRefused("--api-key: has characters that no key has: one line of ASCII is expected")
    tls = client_tls(arguments)
    try:
        with (
            Client(arguments.address, api_key=key, tls=tls, insecure=arguments.insecure) as client,
            client.generate(
                [{"role": "user", "content": text}] if arguments.chat else text,
                model=arguments.model,
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                placement=Placement(arguments.placement),
                kv_path=KvPath(arguments.kv_path) if arguments.kv_path else None,
                timeout_seconds=arguments.timeout,
            ) as stream,
        ):
            for delta in stream:
                if not arguments.json:
                    print(delta.text, end="", flush=True)
            result = stream.result
    except FleetError as error:
        cause = describe_error(error, arguments.address, tls)
        if isinstance(error, DeadlineExceeded) and error.reason is None and arguments.timeout is not None:
            cause = f"the answer was not complete within {arguments.timeout:g} s (--timeout)"
        if error.reason is Reason.UNAUTHENTICATED:
            cause += "; --api-key or --api-key-file gives the key" if not key else "; the key of --api-key is not known"
        print(f"fleet: {cause}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print(msgspec.json.encode(result).decode())
        return DONE
    print()
    for line in summary(result, arguments.address):
        print(line, file=sys.stderr)
    return DONE


def _standard_input() -> str:
    """Read the prompt from standard input.

    Raises ConfigurationRefused if standard input is closed, or its content is not text.
    """
    if sys.stdin is None:
        raise ConfigurationRefused("standard input is closed; give the prompt as an argument, or a file with <")
    try:
        text = sys.stdin.read()
        text.encode()  # raises an error for bytes that are not UTF-8, which some locales read as text
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is no text (UTF-8)"
        raise ConfigurationRefused(f"standard input: {cause}") from error
    return text


def _key(path: str) -> str:
    """Return the API key that a file contains, without surrounding white space.

    Raises:
        ConfigurationRefused: The file cannot be read as text.
    """
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is not a text"
        raise ConfigurationRefused(f"--api-key-file: {path}: {cause}") from error


def summary(result: Result, address: str) -> Iterator[str]:
    """Return lines for a person: token counts, the sources of the prompt's blocks, and the command that explains the placement."""
    usage = result.usage
    yield f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} tokens, {result.finish}"
    for phase in result.kv:
        origins = ", ".join(
            f"{origin.blocks} {origin.source}"
            + (f"/{origin.tier}" if origin.tier else "")
            + (f" ({origin.bytes} bytes)" if origin.bytes else "")
            for origin in phase.report.origins
            if origin.blocks
        )
        yield f"{phase.phase} on {phase.worker_id}: {phase.report.prompt_blocks} blocks: {origins}"
    yield f"fleet explain {result.request_id}{address_option(address)} says why there"
