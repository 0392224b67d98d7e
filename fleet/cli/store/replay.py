"""`fleet kv replay`: computes the hit rate of a recorded trace for an eviction policy and for each given capacity.

Rules:

1. The eviction policy is one of the store's, or "belady", which knows the future requests. `ideal` in the output is the
   hit rate of an unlimited cache.
2. Hit rates are shares of prompt tokens. A capacity in percent refers to the number of distinct blocks in the trace.
3. With several capacities, `sizes` in the output has a row for each. The fields at the top level are those of the first
   capacity.
4. `seconds` is the duration of the replay, without the time to read the file.
5. With `--pauses`, the field `pauses` states the cost of continuing sessions (`kvstore.eviction.session_pauses`). For
   this computation, the store's memory has the first capacity. The tier below the memory has `--below-blocks` blocks, by
   default `BELOW` times as many as the memory. The speeds of memory and lower tier are constants of this module, and the
   eviction policy is always lru. `--beside` adds the requests of another trace, until one of the traces ends. The two
   traces share no sessions and no blocks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.recording.traces import Trace
    from kvstore.eviction.session_pauses import PauseReport
    from kvstore.eviction.trace_replay import TraceRequest

BELADY = "belady"
ADMISSIONS = ("all", "second-sighting")
TOKEN_BYTES = 131_072  # default of --token-bytes: bytes of KV per token of Llama-3-8B in bf16
MOST_BLOCKS = 1 << 40
PAUSES = ("nothing", "hold", "adapt")
BELOW = 10
# default of --held-share: the maximum share of memory in which blocks of paused sessions may be pinned
HELD_SHARE = 0.8
LONGEST_HOLD_SECONDS = 120
MEMORY_PACE = 50e9  # bytes per second from memory to the engine: PCIe 5
BELOW_PACE = 6e9  # bytes per second from the tier below the memory: one NVMe drive
COMPUTE_PACE = 10_000  # prompt tokens that the engine computes per second


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="JSON lines of Mooncake's or of the agentic format, plain or gzip")
    parser.add_argument("--policy", type=_policy, default="lru", metavar="P", help="a policy, or belady (default: lru)")
    parser.add_argument(
        "--capacity-blocks",
        type=_capacities,
        required=True,
        metavar="N[,N...]",
        help="capacity in blocks of 512 tokens, or N%% of all blocks of the trace",
    )
    parser.add_argument(
        "--admission", choices=ADMISSIONS, default="all", help="which blocks may be written (default: all)"
    )
    parser.add_argument(
        "--token-bytes",
        type=_positive,
        default=TOKEN_BYTES,
        metavar="N",
        help=f"bytes of KV per token, for bytes_written (default: {TOKEN_BYTES})",
    )
    parser.add_argument(
        "--live-sessions",
        type=_positive,
        default=64,
        metavar="N",
        help="agentic traces: sessions at a time (default: 64)",
    )
    parser.add_argument(
        "--pauses", choices=PAUSES, help="traces with sessions: treatment of the KV of waiting sessions"
    )
    parser.add_argument(
        "--below-blocks",
        type=_count,
        metavar="N",
        help=f"with --pauses: capacity of the tier below (default: {BELOW} times memory)",
    )
    parser.add_argument(
        "--held-share",
        type=_share,
        default=HELD_SHARE,
        metavar="S",
        help=f"with --pauses: share of memory that sessions may hold (default: {HELD_SHARE})",
    )
    parser.add_argument(
        "--beside", type=Path, metavar="TRACE", help="with --pauses: another trace that uses the same memory"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run the replay. Raises ConfigurationRefused if a trace cannot be read."""
    import msgspec  # noqa: PLC0415 - `fleet --help` needs none of these

    from fleet.recording.trace_rows import TraceError  # noqa: PLC0415
    from fleet.recording.traces import read_trace  # noqa: PLC0415

    try:
        trace = read_trace(arguments.trace, live_sessions=arguments.live_sessions)
        beside = read_trace(arguments.beside) if arguments.beside is not None else None
    except TraceError as error:
        raise ConfigurationRefused(str(error)) from error
    answer = _answer(trace, arguments.policy, arguments.capacity_blocks, arguments.admission, arguments.token_bytes)
    if arguments.pauses is not None:
        answer["pauses"] = _pauses(trace, beside, arguments)
    print(msgspec.json.encode(answer).decode() if arguments.json else "\n".join(_table(answer)))
    return DONE


def _answer(
    trace: "Trace", policy: str, capacities: Sequence[str], admission: str, token_bytes: int
) -> dict[str, object]:
    from fleet.core.clock import SECOND  # noqa: PLC0415
    from fleet.core.system_clock import SystemClock  # noqa: PLC0415
    from kvstore.eviction.policies import policy as policy_named  # noqa: PLC0415
    from kvstore.eviction.trace_replay import distinct_blocks, ideal, optimal, replay  # noqa: PLC0415
    from kvstore.hierarchy.admission import ReuseAdmission  # noqa: PLC0415

    clock = SystemClock()
    footprint = distinct_blocks(trace.requests)
    block_bytes = trace.block_tokens * token_bytes
    rows = []
    for capacity in capacities:
        blocks = _blocks(capacity, footprint)
        begun = clock.now()
        if policy == BELADY:
            done = optimal(trace.requests, capacity_blocks=blocks, block_tokens=trace.block_tokens)
        else:
            done = replay(
                trace.requests,
                policy_named(policy),
                capacity_blocks=blocks,
                block_tokens=trace.block_tokens,
                block_bytes=block_bytes,
                admission=None if admission == "all" else ReuseAdmission[int](),
            )
        rows.append(
            {
                "capacity_blocks": blocks,
                "hit_rate": round(done.hit_rate, 6),
                "bytes_written": done.blocks_written * block_bytes,
                "seconds": round((clock.now() - begun) / SECOND, 3),
            }
        )
    return {
        "requests": len(trace.requests),
        "hit_rate": rows[0]["hit_rate"],
        "ideal": round(ideal(trace.requests, block_tokens=trace.block_tokens).hit_rate, 6),
        "bytes_written": rows[0]["bytes_written"],
        "seconds": rows[0]["seconds"],
        "policy": policy,
        "admission": admission,
        "format": trace.format,
        "capacity_blocks": rows[0]["capacity_blocks"],
        "distinct_blocks": footprint,
        "sizes": rows,
    }


def _pauses(trace: "Trace", beside: "Trace | None", arguments: argparse.Namespace) -> "PauseReport":
    from kvstore.clock import nanos  # noqa: PLC0415
    from kvstore.eviction.session_pauses import BlockCosts, PausePolicy, replay_pauses  # noqa: PLC0415
    from kvstore.eviction.trace_replay import distinct_blocks  # noqa: PLC0415

    blocks = _blocks(arguments.capacity_blocks[0], distinct_blocks(trace.requests))
    below_blocks = BELOW * blocks if arguments.below_blocks is None else arguments.below_blocks
    block_bytes = trace.block_tokens * arguments.token_bytes
    return replay_pauses(
        trace.requests if beside is None else _interleave(trace.requests, beside.requests),
        PausePolicy(arguments.pauses),
        BlockCosts(
            memory=nanos(block_bytes / MEMORY_PACE),
            below=nanos(block_bytes / BELOW_PACE),
            compute=nanos(trace.block_tokens / COMPUTE_PACE),
        ),
        memory_blocks=blocks,
        below_blocks=below_blocks,
        held_blocks=int(arguments.held_share * blocks),
        longest_hold=nanos(LONGEST_HOLD_SECONDS),
    )


def _interleave(requests: "Sequence[TraceRequest]", others: "Sequence[TraceRequest]") -> "list[TraceRequest]":
    """Merge two traces in the order of arrival, until one of them ends.

    Requests of the second trace get no session.
    """
    from kvstore.eviction.trace_replay import TraceRequest  # noqa: PLC0415

    end = min(each[-1].arrival if each else 0 for each in (requests, others))
    renamed = [
        TraceRequest(each.arrival, each.prompt_tokens, tuple(-1 - name for name in each.chain), each.output_tokens)
        for each in others
    ]
    both = [each for each in (*requests, *renamed) if each.arrival <= end]
    return sorted(both, key=lambda each: each.arrival)


def _table(answer: dict[str, object]) -> list[str]:
    sizes = answer["sizes"]
    assert isinstance(sizes, list)
    pauses: list[str] = []
    if (report := answer.get("pauses")) is not None:
        if TYPE_CHECKING:
            assert isinstance(report, PauseReport)
        pauses.append(
            f"{report.resumes} resumes: mean {report.mean_seconds:.3f} s, 90 % within {report.p90_seconds:.3f} s; "
            f"computing all again: mean {report.recompute_mean_seconds:.3f} s"
        )
        pauses.append(
            f"{report.computed_blocks} blocks of their prompts computed again, {report.memory_blocks} from memory, "
            f"{report.below_blocks} from below"
        )
    return [
        f"{answer['requests']} requests, {answer['distinct_blocks']} distinct blocks, ideal hit rate {answer['ideal']:.4f}",
        f"{'blocks':>12}  {'hit rate':>8}  {'GiB written':>11}  {'seconds':>7}   policy {answer['policy']}",
        *(
            f"{row['capacity_blocks']:12}  {row['hit_rate']:8.4f}  {row['bytes_written'] / (1 << 30):11.1f}  {row['seconds']:7.2f}"
            for row in sizes
        ),
        *pauses,
    ]


def _blocks(capacity: str, footprint: int) -> int:
    if capacity.endswith("%"):
        return max(1, int(footprint * float(capacity[:-1]) / 100))
    return int(capacity)


def _policy(name: str) -> str:
    from kvstore.eviction.policies import POLICIES  # noqa: PLC0415

    known = (*POLICIES, BELADY)
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
    return name


def _capacities(text: str) -> list[str]:
    capacities = text.split(",")
    for each in capacities:
        number = each.removesuffix("%")
        try:
            valid = 0 < float(number) <= 100 if each.endswith("%") else 1 <= int(number) <= MOST_BLOCKS
        except ValueError:
            valid = False
        if not valid:
            raise argparse.ArgumentTypeError(f"{each!r} is neither a number of blocks nor a percentage")
    return capacities


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return share


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MOST_BLOCKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
