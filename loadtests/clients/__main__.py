"""Compatibility test: runs unchanged client programs of other projects against Fleet, and the OpenAI client also against plain vLLM.

    python -m loadtests.clients [--engine vllm|simulated] [--clients all|quick|NAME,...] [--url URL] [--json FILE] [--cache DIR]
    python -m loadtests.clients --lock [--clients all|quick|NAME,...] [--cache DIR]

Without --clients, all programs run; `quick` leaves out the programs whose packages take longer than two minutes to install.
Every call of the OpenAI client must be served. The only exceptions are the calls in `results.REFUSALS`, which Fleet refuses and whose
refusal must name the field. Otherwise the exit status is 1. With the engine vllm, plain vLLM runs after Fleet, and calls that plain
vLLM does not serve either are no failures. Each program is installed once, into an environment of its own in a cache folder, with the
package versions that its file in programs/constraints lists. With --lock no program runs. Instead these files are written anew: pip
chooses the newest versions of all packages that are compatible with the pinned version of the program.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import structs

from fleet.config import default_cache_dir
from loadtests.clients.programs.registry import PROGRAMS, lock_program, run_program
from loadtests.clients.results import (
    PROGRAM,
    REFUSALS,
    SIMULATED_REFUSALS,
    CallOutcome,
    CallResult,
    ClientResult,
    missing_here,
    summed,
)
from loadtests.clients.servers import MODEL, ServerAddresses, fleet_up, model_folder, vllm_serve
from loadtests.environments import SystemUnavailable
from workers.engines.vllm.launch import version

OPENAI = "openai"
GROUPS = {"all": tuple(PROGRAMS), "quick": tuple(name for name, program in PROGRAMS.items() if not program.slow)}
DONE, FAILED, MISUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", choices=("vllm", "simulated"), help="of fleet up; vllm by default if it is installed"
    )
    parser.add_argument("--clients", default="all", help=f"all (default), quick, or some of {', '.join(PROGRAMS)}")
    parser.add_argument("--url", help="base URL of a running server, ending in /v1, instead of fleet up")
    parser.add_argument("--model", default=MODEL, help="model of the server at --url")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the environments of programs are kept")
    parser.add_argument(
        "--lock", action="store_true", help="write the constraints of the programs instead of running them"
    )
    arguments = parser.parse_args(argv)
    names = GROUPS.get(arguments.clients) or arguments.clients.split(",")
    if unknown := [name for name in names if name not in PROGRAMS]:
        print(f"loadtests.clients: {', '.join(unknown)}: not one of {', '.join(PROGRAMS)}", file=sys.stderr)
        return MISUSED
    if arguments.url is not None:
        apart = [name for name in names if PROGRAMS[name].api != "http"]
        if apart and arguments.clients not in GROUPS:
            print(f"loadtests.clients: {', '.join(apart)}: calls no HTTP API; leave out --url", file=sys.stderr)
            return MISUSED
        names = [name for name in names if name not in apart]
    cache = arguments.cache or default_cache_dir() / "clients"
    if arguments.lock:
        return _lock(names, cache)
    engine = arguments.engine or ("vllm" if importlib.util.find_spec("vllm") else "simulated")
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


def _lock(names: Sequence[str], cache: Path) -> int:
    for name in names:
        try:
            print(lock_program(name, cache))
        except SystemUnavailable as error:
            print(f"loadtests.clients: {error}", file=sys.stderr)
            return FAILED
    return DONE


def _run(
    names: Sequence[str], engine: str, url: str | None, model: str, cache: Path, folder: Path
) -> tuple[list[ClientResult], dict[str, str]]:
    """Run all client programs; return their results, and by call the reason why an OpenAI call failed that should be served."""
    with _server(url, folder, engine) as addresses:
        calls = {name: _calls(name, getattr(addresses, PROGRAMS[name].api), model, cache, folder) for name in names}
    results = {name: summed(name, PROGRAMS[name].distribution.version, made) for name, made in calls.items()}
    if OPENAI not in calls:
        return list(results.values()), {}
    if engine != "vllm" or url is not None:  # the engine behind --url is unknown
        return list(results.values()), missing_here(calls[OPENAI], SIMULATED_REFUSALS)
    with vllm_serve(folder) as address:
        theirs = _calls(OPENAI, address, MODEL, cache, folder)
    results[OPENAI] = structs.replace(results[OPENAI], beside=summed("vllm", version(), theirs))
    return list(results.values()), missing_here(calls[OPENAI], REFUSALS, theirs)


@contextmanager
def _server(url: str | None, folder: Path, engine: str) -> Iterator[ServerAddresses]:
    if url is not None:
        yield ServerAddresses(url)
        return
    with fleet_up(folder, engine) as addresses:
        yield addresses


def _calls(name: str, address: str, model: str, cache: Path, folder: Path) -> list[CallResult]:
    try:
        return run_program(name, address, model, folder / MODEL, cache, folder / name)
    except SystemUnavailable as error:
        return [CallResult(call=PROGRAM, outcome=CallOutcome.FAILED, why=str(error))]


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
