"""Benchmark of the KV store, compared with the machine's limits and with other stores: interleaved rounds, medians, one table.

    python -m loadtests.kvstore.bench [--quick] [--json FILE] [--rounds N] [--only WORD] [--no-peers] [--traces DIR] [--folder DIR]

Compared systems are installed once from PyPI, into virtual environments in a cache folder; `--no-peers` leaves them out. This project
contains no part of them: each runs in its own process and is called through its public API.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from fleet.config import default_cache_dir
from loadtests import host
from loadtests.kvstore.benchmarks import codecs as codec_lines
from loadtests.kvstore.benchmarks import disk as disk_lines
from loadtests.kvstore.benchmarks import keys as key_lines
from loadtests.kvstore.benchmarks import memory as memory_lines
from loadtests.kvstore.benchmarks import policies as policy_lines
from loadtests.kvstore.benchmarks import processes as crossing_lines
from loadtests.kvstore.benchmarks import restart as restart_lines
from loadtests.kvstore.benchmarks.plan import BenchmarkPlan, quick
from loadtests.kvstore.compared.systems import ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, LineResult, measure, table

PACKAGES = ("fleet-serving", "numpy", "google-crc32c", "grpcio", "xxhash", "nixl", "redis")

Group = Callable[[BenchmarkPlan, ComparedSystems], AbstractContextManager[Sequence[BenchmarkLine]]]

GROUPS: dict[str, Group] = {
    "memory": memory_lines.lines,
    "disk": disk_lines.lines,
    "crossing": crossing_lines.lines,
    "keys": key_lines.lines,
    "restart": restart_lines.lines,
    "policies": policy_lines.lines,
    "codecs": codec_lines.lines,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines here as well")
    parser.add_argument("--quick", action="store_true", help="a few minutes; figures not to be quoted")
    parser.add_argument("--rounds", type=int, metavar="N", help="at least 3; 5 by default, 3 with --quick")
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="groups or lines whose name has this in it; repeatable"
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure the peers as well"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the peers' environments are kept")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of the public traces; else a short cut of one"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="on the disk to measure; the system's temporary one by default"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds is not None and arguments.rounds < 3:
        print("--rounds: at least 3, or there is no median to speak of", file=sys.stderr)
        return 2
    cache = arguments.cache or default_cache_dir() / "bench"
    with tempfile.TemporaryDirectory(prefix="fleet-kv-bench-", dir=arguments.folder) as name:
        folder = Path(name)
        plan = (
            quick(folder, arguments.traces)
            if arguments.quick
            else BenchmarkPlan(folder=folder, traces=arguments.traces)
        )
        if arguments.rounds is not None:
            plan = msgspec.structs.replace(plan, rounds=arguments.rounds)
        peers = ComparedSystems(cache, folder, wanted=arguments.peers)
        try:
            results = _measure(plan, peers, arguments.only or [])
        finally:
            peers.close()
        machine = host.facts(folder, PACKAGES)
    if arguments.json:
        arguments.json.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load {machine['load']}")
    print(f"disk: {machine['file_system']}; kernel {machine['kernel']}; Python {machine['python']}")
    print(
        f"versions: {', '.join(f'{name} {version}' for name, version in (machine['versions'] | peers.versions).items())}"
    )
    print(f"{plan.rounds} rounds, interleaved; medians{'; --quick: not to be quoted' if arguments.quick else ''}")
    if machine["load"] > machine["cores"]:
        print(f"others use this machine (load {machine['load']}): not even the ratios are to be trusted")
    print(table(results))
    return 0


def _measure(plan: BenchmarkPlan, peers: ComparedSystems, only: Sequence[str]) -> list[LineResult]:
    results = []
    for name, group in GROUPS.items():
        with group(plan, peers) as lines:
            for line in lines:
                if only and not any(word in f"{name}: {line.name}" for word in only):
                    continue
                results.append(measure(line, plan.rounds))
                print(f"{name}: {line.name}: {results[-1].fleet} {line.unit}", file=sys.stderr)
        gc.collect()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configure(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
