"""Benchmark of eviction policies: hit rates on recorded traces at small capacities, computed by `fleet kv replay`, compared with LRU.

Compared systems use LRU. The limit is the rate of a cache that never evicts. A replay is exact, so one round is enough; the command
is called once for each trace, policy and capacity.
"""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.benchmarks.plan import BenchmarkPlan
from loadtests.kvstore.compared.systems import ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, LineDirection
from loadtests.kvstore.nodes import ROOT, environment

OURS = "hazard"
PEERS = "lru"
SHARES = (0.01, 0.02, 0.05, 0.10)  # capacities, as shares of all blocks of the trace
REPLAY_SECONDS = 600
CUTS = ROOT / "tests" / "data"  # the beginnings of the traces, for machines without the whole traces


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:  # noqa: ARG001 - their policy is replayed instead
    """Yield a line for each trace and capacity."""
    folder = plan.traces or CUTS
    yield [
        BenchmarkLine(
            name=f"hit rate, {trace.name.partition('.')[0]} at {share:.0%}",
            unit="share",
            better=LineDirection.MORE,
            limit=partial(_replayed, trace, PEERS, share, "ideal"),
            limit_is="a cache that never evicts",
            fleet=partial(_replayed, trace, OURS, share, "hit_rate"),
            peers={"LRU": partial(_replayed, trace, PEERS, share, "hit_rate")},
        )
        for trace in sorted(folder.glob("*.jsonl*"))
        for share in SHARES
    ]


def _replayed(trace: Path, policy: str, share: float, field: str) -> float:
    return float(_replay(trace, policy, max(1, round(share * _blocks(trace))))[field])


@cache
def _replay(trace: Path, policy: str, capacity_blocks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleet.cli.main", "kv", "replay", str(trace.resolve()), "--policy", policy]
    command += ["--capacity-blocks", str(capacity_blocks), "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=REPLAY_SECONDS, check=False
    )
    if done.returncode:
        raise SystemUnavailable(f"fleet kv replay: {done.stderr.strip()[-300:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@cache
def _blocks(trace: Path) -> int:
    """Return the number of distinct blocks in a trace.

    A request lists all its block ids (`hash_ids`) or only the added ones (`hash_delta`). Rows with the scope `local` have block ids
    of their own, so an equal id in another row is another block.
    """
    content = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    shared: set[int] = set()
    own = 0
    for line in content.splitlines():
        row = json.loads(line)
        if row.get("hash_id_scope") == "local":
            seen: set[int] = set()
            _note(row, seen)
            own += len(seen)
        else:
            _note(row, shared)
    return len(shared) + own


def _note(found: object, seen: set[int]) -> None:
    """Collect the block ids of a row: sessions contain requests, requests contain ids."""
    if isinstance(found, list):
        for each in found:
            _note(each, seen)
    elif isinstance(found, dict):
        seen.update(found.get("hash_ids", ()))
        for first, count in found.get("hash_delta", {}).get("add", ()):
            seen.update(range(first, first + count))
        for each in found.values():
            if isinstance(each, list | dict):
                _note(each, seen)
