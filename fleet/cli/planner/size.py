"""`fleet plan size`: computes the cheapest pools for a load, and from which load on they are cheaper than a hosted endpoint."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.console.seconds import seconds
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.hardware.known_models import SizedModel
    from fleet.planner.sizing.prices import HostedPrice, PriceBook
    from fleet.planner.sizing.proposal import PoolProposal, PricedGpu

LOWEST, HIGHEST = 1e-6, 1e9
"""Smallest and largest value of numbers that must be above 0."""

PLAUSIBLE_TTFT, PLAUSIBLE_TPOT = 300.0, 5.0
"""Goals in seconds above which a warning asks whether milliseconds were meant."""


def configure(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--model",
        type=Path,
        required=True,
        help="a Hugging Face folder, its config.json, or a repository that is known by name",
    )
    load.add_argument("--rate", type=_above_zero, required=True, metavar="R", help="requests per second")
    load.add_argument("--prompt", type=_above_zero, required=True, metavar="TOKENS", help="mean prompt length")
    load.add_argument("--answer", type=_above_zero, required=True, metavar="TOKENS", help="mean answer length")
    load.add_argument(
        "--cached", type=_number, default=0.0, metavar="TOKENS", help="prompt tokens in a cache (default: 0)"
    )
    load.add_argument(
        "--spread",
        type=_number,
        default=0.0,
        metavar="CV",
        help="standard deviation of prompt lengths, divided by their mean (default: 0)",
    )
    load.add_argument(
        "--dispersion",
        type=_above_zero,
        default=1.0,
        metavar="I",
        help="variance of the number of arrivals, divided by its mean: 1 is Poisson, more is bursty (default: 1)",
    )
    goals = parser.add_argument_group("goals and limits")
    goals.add_argument(
        "--ttft", type=seconds, required=True, metavar="SECONDS", help="time to the first token, in seconds"
    )
    goals.add_argument(
        "--tpot", type=seconds, required=True, metavar="SECONDS", help="time for each further token, in seconds"
    )
    goals.add_argument(
        "--percentile",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="requests that must keep each goal (default: 0.95)",
    )
    goals.add_argument(
        "--headroom", type=float, default=0.8, metavar="SHARE", help="most of the throughput used (default: 0.8)"
    )
    goals.add_argument("--most-gpus", type=int, metavar="N", help="GPUs that there are")
    goals.add_argument("--most-dollars", type=_above_zero, metavar="N", help="dollars per hour that may be spent")
    cost = parser.add_argument_group("hardware and prices")
    cost.add_argument(
        "--gpus",
        metavar="NAMES",
        help="names from `fleet hardware list`, by commas (default: all with a price on which --backend runs)",
    )
    cost.add_argument("--backend", default="vllm", help="vllm, sglang or trtllm (default: vllm)")
    cost.add_argument("--prices", type=Path, metavar="FILE", help="price book; see docs (default: list prices)")
    cost.add_argument("--region", metavar="NAME", help="region of the price book (default: its first)")
    cost.add_argument(
        "--hosted-prompt", type=_number, metavar="DOLLARS", help="hosted price of a million prompt tokens"
    )
    cost.add_argument(
        "--hosted-answer", type=_number, metavar="DOLLARS", help="hosted price of a million answer tokens"
    )
    cost.add_argument(
        "--minimise",
        choices=("dollars", "energy"),
        default="dollars",
        help="cost by which the pools are chosen (default: dollars)",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write JSON to this file, or to standard output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Return the exit status: 0 if pools were found for the whole load; 1 if the goals or limits allow no pools, or only
    pools for a lower rate. With status 1, the output gives the reason as conditions.
    """
    import msgspec  # noqa: PLC0415 - `fleet --help` needs none of these

    from fleet.cli.console.files import whole_file  # noqa: PLC0415
    from fleet.cli.simulator.outputs import check_outputs  # noqa: PLC0415
    from fleet.hardware.latency.open_loop import RequestShape  # noqa: PLC0415
    from fleet.planner.decisions import PlanBudget, PlanGoals  # noqa: PLC0415
    from fleet.planner.sizing.capacity import OfferedLoad  # noqa: PLC0415
    from fleet.planner.sizing.proposal import propose_pools  # noqa: PLC0415
    from fleet.planner.sizing.solver import SolverTimeout  # noqa: PLC0415

    _check(arguments)
    check_outputs(arguments, ["json"])
    _warn_of_milliseconds(arguments)
    book = _book(arguments.prices)
    region = _region(arguments, book)
    shape = RequestShape(prompt_tokens=arguments.prompt, answer_tokens=arguments.answer, cached_tokens=arguments.cached)
    try:
        proposal = propose_pools(
            _model(arguments.model),
            _gpus(arguments, book, region),
            OfferedLoad(shape=shape, prompt_spread=arguments.spread**2, dispersion=arguments.dispersion),
            arguments.rate,
            PlanGoals(ttft_seconds=arguments.ttft, tpot_seconds=arguments.tpot, percentile=arguments.percentile),
            PlanBudget(gpus=arguments.most_gpus, dollars_per_hour=arguments.most_dollars),
            headroom=arguments.headroom,
            backend=arguments.backend,
            minimise=arguments.minimise,
        )
    except SolverTimeout as error:
        print(f"fleet plan size: {error}; name fewer GPU types with --gpus", file=sys.stderr)
        return FAILED
    answer = msgspec.to_builtins(proposal) | _break_even(arguments, proposal)
    if arguments.json is None:
        print("\n".join(_lines(arguments, proposal, answer)))
    elif arguments.json == "-":
        print(msgspec.json.encode(answer).decode())
    else:
        with whole_file(Path(arguments.json), "--json") as path:
            path.write_bytes(msgspec.json.encode(answer) + b"\n")
    return FAILED if proposal.conditions else DONE


def _lines(arguments: argparse.Namespace, proposal: "PoolProposal", answer: dict[str, Any]) -> list[str]:
    from fleet.hardware.power import ERROR  # noqa: PLC0415

    pools = [
        (
            f"{each.role:8} {each.replicas:5} x {each.tp} {each.gpu:8} {each.gpus:6} GPUs {each.dollars_per_hour:10.2f} $/h"
            f" {each.rate:10.2f} requests/s at most"
        )
        for each in proposal.pools
    ]
    conditions = [f"{each.type}: {each.message}" for each in proposal.conditions]
    if not pools:
        return conditions
    cost = (
        f"{proposal.gpus} GPUs, {proposal.dollars_per_hour:.2f} $/h, {proposal.dollars_per_million_tokens:.3g} $ per million"
        f" tokens, {proposal.dollars_per_million_answer_tokens:.3g} $ per million answer tokens"
    )
    energy = (
        f"{proposal.watts / 1000:,.1f} kW under load (± {ERROR:.0%}, boards alone), {_joules(proposal.joules_per_token)} a token,"
        f" {_joules(proposal.joules_per_answer_token)} an answer token"
    )
    latency = (
        f"TTFT {proposal.ttft_seconds:.3g} s and TPOT {proposal.tpot_seconds:.3g} s for {arguments.percentile:.0%} of the"
        f" requests at {proposal.rate:.4g} a second"
    )
    return [*pools, cost, energy, latency, *_hosted_lines(answer["break_even_utilisation"]), *conditions]


def _joules(joules: float) -> str:
    return f"{joules:,.0f} J" if joules >= 100 else f"{joules:.2g} J"


def _hosted_lines(share: float | None) -> list[str]:
    if share is None:
        return []
    if share <= 1.0:
        return [f"a hosted endpoint is cheaper below {share:.0%} of this rate"]
    return [f"a hosted endpoint is cheaper at any rate up to this one: the GPUs cost {share:.2g} times as much"]


def _break_even(arguments: argparse.Namespace, proposal: "PoolProposal") -> dict[str, float | None]:
    from fleet.planner.sizing.prices import break_even  # noqa: PLC0415

    hosted = _hosted(arguments)
    if hosted is None or not proposal.pools:
        return {"hosted_dollars_per_hour": None, "break_even_utilisation": None}
    request = hosted.dollars(arguments.prompt, arguments.answer)
    return {
        "hosted_dollars_per_hour": request * proposal.rate * 3600.0,
        "break_even_utilisation": break_even(proposal.dollars_per_hour, proposal.rate, request),
    }


def _hosted(arguments: argparse.Namespace) -> "HostedPrice | None":
    from fleet.planner.sizing.prices import HostedPrice  # noqa: PLC0415

    if arguments.hosted_prompt is None or arguments.hosted_answer is None:
        return None
    return HostedPrice(prompt=arguments.hosted_prompt, answer=arguments.hosted_answer)


def _check(arguments: argparse.Namespace) -> None:
    for name in ("percentile", "headroom"):
        if not 0 < getattr(arguments, name) < 1:
            raise ConfigurationRefused(f"--{name}: {getattr(arguments, name):g} is not between 0 and 1")
    if arguments.cached >= arguments.prompt:
        raise ConfigurationRefused(f"--cached: {arguments.cached:g} must be below --prompt, {arguments.prompt:g}")
    if arguments.most_gpus is not None and arguments.most_gpus < 1:
        raise ConfigurationRefused(f"--most-gpus: {arguments.most_gpus} must be at least 1")
    if arguments.backend not in {"vllm", "sglang", "trtllm"}:
        raise ConfigurationRefused(f"--backend: {arguments.backend!r} is not one of vllm, sglang, trtllm")
    for name, other in (("prompt", "answer"), ("answer", "prompt")):
        if getattr(arguments, f"hosted_{name}") is None and getattr(arguments, f"hosted_{other}") is not None:
            raise ConfigurationRefused(f"--hosted-{name}: is needed with --hosted-{other}; 0 if these tokens are free")


def _warn_of_milliseconds(arguments: argparse.Namespace) -> None:
    for name, plausible in (("ttft", PLAUSIBLE_TTFT), ("tpot", PLAUSIBLE_TPOT)):
        if (goal := getattr(arguments, name)) > plausible:
            print(
                f"fleet: --{name}: {goal:g} is taken as seconds; for milliseconds, give {goal / 1000:g}",
                file=sys.stderr,
            )


def _model(named: Path) -> "SizedModel":
    from fleet.hardware.known_models import SizedModel, model_by_repository  # noqa: PLC0415
    from fleet.hardware.model_configs import read_model_config  # noqa: PLC0415

    try:
        if named.exists():
            return SizedModel(model=read_model_config(named), context=0)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"--model: {error}") from error
    except OSError as error:  # the name is too long, or a folder may not be searched
        raise ConfigurationRefused(f"--model: {named}: {error.strerror}") from error
    if (known := model_by_repository(str(named))) is None:
        raise ConfigurationRefused(
            f"--model: {named} is no file or folder, and no repository that Fleet knows; name the model's config.json"
        )
    return known


def _book(file: Path | None) -> "PriceBook":
    from fleet.planner.price_books import read_price_book  # noqa: PLC0415
    from fleet.planner.sizing.prices import list_prices  # noqa: PLC0415

    if file is None:
        return list_prices()
    try:
        return read_price_book(file)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"--prices: {error}") from error


def _region(arguments: argparse.Namespace, book: "PriceBook") -> str:
    region: str = arguments.region or next(iter(book.regions))
    if region in book.regions:
        return region
    if arguments.prices is None:
        raise ConfigurationRefused(f"--region: {region!r} needs --prices, a price book with this region")
    raise ConfigurationRefused(
        f"--region: {region!r} is not a region of {arguments.prices}; use {', '.join(book.regions)}"
    )


def _gpus(arguments: argparse.Namespace, book: "PriceBook", region: str) -> "list[PricedGpu]":
    """Return the GPUs that are named, or all GPUs of a region of the price book on which the engine runs.

    Raises:
        ConfigurationRefused: A GPU is unknown or has no price, or the engine does not run on a GPU that is named, or on any
            GPU of the region.
    """
    from fleet.hardware.gpus import gpu  # noqa: PLC0415
    from fleet.planner.sizing.proposal import PricedGpu  # noqa: PLC0415

    names: str | None = arguments.gpus
    chosen = list(book.regions[region]) if names is None else [name.strip() for name in names.split(",")]
    found = {name: gpu(name, "--gpus") for name in chosen}
    for name in found:
        if name not in book.regions[region]:
            raise ConfigurationRefused(
                f"--gpus: {name} has no list price; give its price in a price book with --prices"
                if arguments.prices is None
                else f"--gpus: {arguments.prices}: regions.{region}.{name}: the price book has no price for this GPU"
            )
    backend: str = arguments.backend
    unfit = [name for name, each in found.items() if not each.runs(backend)]
    if unfit and (names is not None or len(unfit) == len(found)):
        which = "--gpus" if names is not None else f"--region: {region}"
        raise ConfigurationRefused(f"{which}: --backend {backend} does not run on {', '.join(unfit)}; name other GPUs")
    return [
        PricedGpu(gpu=each, dollars_per_hour=book.dollars(name, region))
        for name, each in found.items()
        if each.runs(backend)
    ]


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= HIGHEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {HIGHEST:g}")
    return number


def _above_zero(text: str) -> float:
    if (number := _number(text)) < LOWEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LOWEST:g} to {HIGHEST:g}")
    return number
