"""Client programs against Fleet, unchanged, and the calls of the OpenAI client against plain vLLM in the same run.

    python -m loadtests.clients [--engine vllm|simulated] [--clients all|quick|NAME,...] [--url URL] [--json FILE] [--cache DIR]

Without --clients, all run; `quick` leaves out those whose packages take longer than two minutes to install. Every call of the OpenAI client has to be served,
or be one that Fleet is known to refuse, with the name of the field; otherwise the exit status is 1. With the engine vllm, plain vLLM runs after Fleet, and
this holds only for the calls that it serves. Other programs are installed once, into environments in a cache folder.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.config import default_cache_dir
from loadtests.clients.openai_calls import REFUSALS, SIMULATED_REFUSALS, run_calls
from loadtests.clients.programs.registry import PROGRAMS, run_program
from loadtests.clients.results import CallResult, ClientResult, missing_here, summed
from loadtests.clients.servers import MODEL, ServerAddresses, fleet_up, model_folder, vllm_serve
from loadtests.environments import SystemUnavailable
from workers.engines.vllm.launch import version

OPENAI = "openai"
KNOWN = (OPENAI, *PROGRAMS)
GROUPS = {"all": KNOWN, "quick": tuple(name for name in KNOWN if name not in PROGRAMS or not PROGRAMS[name].slow)}
DONE, FAILED, MISUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", choices=("vllm", "simulated"), help="of fleet up; vllm by default if it is installed"
    )
    parser.add_argument("--clients", default="all", help=f"all (default), quick, or some of {', '.join(KNOWN)}")
    parser.add_argument("--url", help="base URL of a running server, ending in /v1, instead of fleet up")
    parser.add_argument("--model", default=MODEL, help="model of the server at --url")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the environments of programs are kept")
    arguments = parser.parse_args(argv)
    names = GROUPS.get(arguments.clients) or arguments.clients.split(",")
    if unknown := [name for name in names if name not in KNOWN]:
        print(f"loadtests.clients: {', '.join(unknown)}: not one of {', '.join(KNOWN)}", file=sys.stderr)
        return MISUSED
    if arguments.url is not None:
        apart = [name for name in names if name in PROGRAMS and PROGRAMS[name].api != "http"]
        if apart and arguments.clients not in GROUPS:
            print(f"loadtests.clients: {', '.join(apart)}: calls no HTTP API; leave out --url", file=sys.stderr)
            return MISUSED
        names = [name for name in names if name not in apart]
    engine = arguments.engine or ("vllm" if importlib.util.find_spec("vllm") else "simulated")
    cache = arguments.cache or default_cache_dir() / "clients"
    with tempfile.TemporaryDirectory(prefix="fleet-clients-") as scratch:
        folder = Path(scratch)
        model_folder(folder)
        try:
            results, missing = _run(names, engine, arguments.url, arguments.model, cache, folder)
        except SystemUnavailable as error:
            print(f"loadtests.clients: {error}", file=sys.stderr)
            return FAILED
    _show(results, missing)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return FAILED if missing or any(result.failed for result in results if result.name != OPENAI) else DONE


def _run(
    names: Sequence[str], engine: str, url: str | None, model: str, cache: Path, folder: Path
) -> tuple[list[ClientResult], dict[str, str]]:
    """Run all clients; return their results, and the OpenAI calls that were to be served and were not."""
    own: list[CallResult] = []
    with _server(url, folder, engine) as addresses:
        if OPENAI in names:
            own = run_calls(addresses.http, model)
        programs = [_program(name, addresses, model, cache, folder) for name in names if name in PROGRAMS]
    beside: ClientResult | None = None
    theirs: list[CallResult] | None = None
    refusals = SIMULATED_REFUSALS  # of a server at a URL, too, whose engine is not known
    if own and engine == "vllm" and url is None:
        with vllm_serve(folder) as address:
            theirs = run_calls(address, MODEL)
        refusals = REFUSALS
        beside = summed("vllm", version(), theirs)
    openai = [summed(OPENAI, importlib.metadata.version(OPENAI), own, beside)] if own else []
    return openai + programs, missing_here(own, refusals, theirs)


@contextmanager
def _server(url: str | None, folder: Path, engine: str) -> Iterator[ServerAddresses]:
    if url is not None:
        yield ServerAddresses(url)
        return
    with fleet_up(folder, engine) as addresses:
        yield addresses


def _program(name: str, addresses: ServerAddresses, model: str, cache: Path, folder: Path) -> ClientResult:
    program = PROGRAMS[name]
    pinned = program.distribution.version
    address = getattr(addresses, program.api)
    try:
        results = run_program(name, address, model, folder / MODEL, cache, folder / name)
    except SystemUnavailable as error:
        return ClientResult(name=name, version=pinned, passed=0, failed=1, why={"install": str(error)})
    return summed(name, pinned, results)


def _show(results: Sequence[ClientResult], missing: dict[str, str]) -> None:
    for result in results:
        print(
            f"{result.name} {result.version}: {result.passed} passed, {result.refused} refused, {result.failed} failed"
        )
        for call, why in result.why.items():
            print(f"  {call}: {why}")
        if (beside := result.beside) is not None:
            print(
                f"  plain {beside.name} {beside.version}: {beside.passed} passed, {beside.refused} refused, {beside.failed} failed"
            )
    for call, why in missing.items():
        print(f"neither served nor known to be refused: {call}: {why}")


if __name__ == "__main__":
    sys.exit(main())
