"""Benchmark that compares Fleet's router with other routers and with the cheapest possible relay, in interleaved rounds.

    python -m loadtests.router [--targets NAME[+tls][:POLICY],...] [--scenarios NAME,...] [--rounds N] [--quick] [--json FILE] [--before DIR]

The main figure is the CPU time of the router process with all its threads and children, because rates and latencies depend on what
else runs on the machine. The router runs on the first core, workers and client on the other cores. Compared systems are installed once
from PyPI, into virtual environments in a cache folder.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleet.config import default_cache_dir
from fleet.core.errors import ConfigurationRefused
from fleet.local.tiny_model import build_tiny_model
from loadtests import host
from loadtests.router import grpc_stream
from loadtests.router.comparison import contest, write
from loadtests.router.figures import BenchmarkRow, table
from loadtests.router.load.prompts import Vocabulary, model_with_long_context
from loadtests.router.scenarios import SCENARIOS, quick
from loadtests.router.systems.processes import cores_of_this_process
from loadtests.router.systems.targets import BEFORE, KNOWN, BenchmarkSetting, targets

DEFAULT_TARGETS = (
    "relay,fleet,sglang-router:round_robin,sglang-router,smg:round_robin,smg,vllm-router:round_robin,vllm-router,dynamo"
)
PACKAGES = ("fleet-serving", "uvloop", "msgspec", "fastokens", "httptools", "xxhash")
ALL_SCENARIOS = (*SCENARIOS, grpc_stream.NAME)
MISUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets",
        default=DEFAULT_TARGETS,
        help=f"of {', '.join(KNOWN)}, with +tls for TLS at the client's port; by default {DEFAULT_TARGETS}",
    )
    parser.add_argument(
        "--scenarios", default=",".join(ALL_SCENARIOS), help=f"of {', '.join(ALL_SCENARIOS)}; all by default"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="3 by default, 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="see that everything runs; figures not to be quoted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the peers' environments are kept")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="another checkout of Fleet, measured as the target fleet-before"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="where logs and settings of the routers stay")
    arguments = parser.parse_args(argv)
    try:
        contestants = targets([*arguments.targets.split(","), *([BEFORE] if arguments.before else [])])
        scenarios = _known(arguments.scenarios.split(","))
    except ConfigurationRefused as error:
        print(f"loadtests.router: {error}", file=sys.stderr)
        return MISUSED
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    tiny = build_tiny_model(default_cache_dir(), tokenizer_only=True)
    vocabulary = Vocabulary(tiny)
    rows: list[BenchmarkRow] = []
    with tempfile.TemporaryDirectory(prefix="fleet-router-bench-") as name:
        folder = arguments.keep_logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model_dir = model_with_long_context(tiny, folder)
        machine = host.facts(folder, PACKAGES)
        for scenario in scenarios:
            setting = BenchmarkSetting(
                model_dir=model_dir,
                folder=folder / scenario,
                cache=(arguments.cache or default_cache_dir() / "bench").resolve(),
                cores=cores_of_this_process(),
                before=arguments.before and arguments.before.resolve(),
            )
            setting.folder.mkdir(exist_ok=True)
            if scenario == grpc_stream.NAME:
                found = grpc_stream.contest(contestants, rounds, setting, arguments.seed, short=arguments.quick)
            else:
                chosen = quick(SCENARIOS[scenario]) if arguments.quick else SCENARIOS[scenario]
                found = contest(chosen, contestants, rounds, setting, vocabulary, arguments.seed)
            rows += [msgspec.structs.replace(each, machine=machine) for each in found]
            print(table(found), file=sys.stderr)
            if arguments.json:
                write(rows, arguments.json)
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load {machine['load']}")
    print(f"kernel {machine['kernel']}; Python {machine['python']}; {_versions(rows, machine['versions'])}")
    print(f"{rounds} rounds, interleaved; medians{'; --quick: not to be quoted' if arguments.quick else ''}")
    print(table(rows))
    return 0


def _known(names: Sequence[str]) -> Sequence[str]:
    """Return the names if all of them are known.

    Raises:
        ConfigurationRefused: A name is unknown.
    """
    if unknown := [name for name in names if name not in ALL_SCENARIOS]:
        raise ConfigurationRefused(f"--scenarios: {unknown[0]} is not one of {', '.join(ALL_SCENARIOS)}")
    return names


def _versions(rows: Sequence[BenchmarkRow], packages: dict[str, str]) -> str:
    measured = {each.target.partition(":")[0]: each.version for each in rows if each.version}
    return ", ".join(f"{name} {version}" for name, version in (packages | measured).items())


if __name__ == "__main__":
    sys.exit(main())
