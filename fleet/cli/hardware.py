"""`fleet hardware`: lists accelerators, shows the accuracy of the latency model, and estimates models on them."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.cli.console.exits import DONE

if TYPE_CHECKING:
    from fleet.hardware.latency.coefficients import AccuracyRow
    from fleet.hardware.latency.step_model import StepModel
    from fleet.hardware.models import ModelSizes, Precision
    from fleet.hardware.sharding import ShardedModel

NUMBERS = ("bf16", "fp8", "fp4", "int4")
LARGEST = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="hardware_command", required=True, metavar="COMMAND", parser_class=type(parser)
    )
    listing = _command(commands, "list", "list the accelerators that are known, with the sources of their figures")
    accuracy = _command(
        commands, "accuracy", "print how far predictions are from measurements that they were not fitted to"
    )
    accuracy.add_argument(
        "--data",
        type=Path,
        metavar="WHEEL",
        help="predict the measurements in this aiconfigurator-core wheel instead of printing the recorded figures",
    )
    estimate = _command(commands, "estimate", "estimate memory, latency and cost of a model on GPUs")
    estimate.add_argument(
        "model", type=Path, help="a Hugging Face folder, its config.json, or a repository that is known by name"
    )
    estimate.add_argument("--gpu", required=True, metavar="NAME", help="a name from `fleet hardware list`")
    estimate.add_argument("--backend", default="vllm", help="vllm, sglang or trtllm (default: vllm)")
    estimate.add_argument("--weights", choices=NUMBERS, help="how weights are stored (default: as the config says)")
    estimate.add_argument("--kv", choices=NUMBERS, help="how the KV cache is stored (default: bf16)")
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "attention data"), ("ep", "expert")):
        estimate.add_argument(
            f"--{name}", type=_positive, default=1, metavar="N", help=f"{meaning} parallelism (default: 1)"
        )
    for name, default in (("prompt", 2048), ("answer", 256), ("concurrency", 32)):
        estimate.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"(default: {default})")
    for each in (listing, accuracy, estimate):
        each.add_argument(
            "--json", nargs="?", const="-", metavar="FILE", help="write JSON to this file, or to standard output"
        )


def run(arguments: argparse.Namespace) -> int:
    match arguments.hardware_command:
        case "list":
            answer, lines = _list()
        case "accuracy":
            answer, lines = _accuracy(arguments.data)
        case _:
            answer, lines = _estimate(arguments)
    return _print(answer, lines, arguments.json)


def _list() -> tuple[Any, Sequence[str]]:
    from fleet.hardware.gpus import Number, gpus  # noqa: PLC0415 - `fleet --help` needs none of these

    known = gpus()
    lines = [f"{'':7} {'GiB':>6} {'TB/s':>5} {'bf16':>6} {'fp8':>6} {'fp4':>6}  {'W':>5} {'$/h':>5}  (dense TFLOPS)"]
    for name, each in known.items():
        speeds = " ".join(
            f"{each.flops[number] / 1e12:6.0f}" if number in each.flops else f"{'-':>6}"
            for number in (Number.BF16, Number.FP8, Number.FP4)
        )
        price = f"{each.price.dollars:5.2f}" if each.price else "    -"
        lines.append(
            f"{name:7} {each.memory_gib:6.1f} {each.bandwidth / 1e12:5.2f} {speeds}  {each.watts:5.0f} {price}  {each.name}"
        )
    return known, lines


def _accuracy(wheel: Path | None) -> tuple[Any, Sequence[str]]:
    from fleet.hardware.latency.coefficients import coefficients  # noqa: PLC0415

    rows = list(coefficients().accuracy) if wheel is None else _predicted(wheel)
    titles = {
        "model": "measured models, at curves that were not fitted to",
        "gpu": "models that were not fitted to at all",
        "engine": "GPUs that were not fitted to at all",
    }
    answer: list[dict[str, Any]] = []
    lines: list[str] = []
    for basis, title in titles.items():
        shown = [row for row in rows if row.basis == basis]
        if not shown:
            continue
        lines += ["", title] if lines else [title]
        lines.append(
            f"  {'system':7} {'engine':7} {'phase':14} {'model':14} {'rows':>5}  {'TTFT mean':>9} {'median':>7}"
            f"  {'TPOT mean':>9} {'median':>7}"
        )
        for row in shown:
            of = row.accuracy
            lines.append(
                f"  {row.system:7} {row.backend:7} {row.phase:14} {row.model:14} {of.rows:5}  {of.ttft_mape:9.1%}"
                f" {of.ttft_median:7.1%}  {of.tpot_mape:9.1%} {of.tpot_median:7.1%}"
            )
            answer.append(_flat(row))
    return answer, lines


def _predicted(wheel: Path) -> "list[AccuracyRow]":
    """Return the errors of the latency model's predictions, for those measurements that the model was not fitted to.

    Each row is for one combination of GPU system, engine, phase and model.

    `wheel` is a wheel of aiconfigurator, which contains the measurements.
    """
    from fleet.hardware.aiconfigurator import read_sample  # noqa: PLC0415
    from fleet.hardware.latency.coefficients import AccuracyRow, EstimateBasis, coefficients  # noqa: PLC0415
    from fleet.hardware.latency.measurements import accuracy, cells  # noqa: PLC0415
    from fleet.hardware.latency.prediction import can_be_placed, predict  # noqa: PLC0415

    known, sample = coefficients(), read_sample(wheel)
    tested = [each for each in sample.measurements if each.held_out and can_be_placed(each, sample.models)]
    print(
        f"fleet: {sample.rows} rows: {len(sample.measurements)} distinct measurements that say what was run, "
        f"{len(tested)} of them held out and possible as they say; {sample.left_out} do not say what was run",
        file=sys.stderr,
    )
    predicted = {each: predict(each, sample.models, known) for each in tested}
    rows = []
    for cell in cells(tested):
        found = accuracy([each for each in tested if cell.holds(each)], predicted.__getitem__)
        assert found is not None, "every cell has a measurement"
        rows.append(
            AccuracyRow(
                basis=EstimateBasis.MODEL,
                system=cell.system,
                backend=cell.backend,
                phase=cell.phase,
                model=cell.model,
                accuracy=found,
                fitted_on="four of five curves",
                tested_on="the fifth curve",
            )
        )
    return rows


def _flat(row: "AccuracyRow") -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    figures = msgspec.to_builtins(row.accuracy)
    return {
        "system": row.system,
        "backend": row.backend,
        "phase": row.phase,
        "model": row.model,
        "basis": row.basis,
        **figures,
        "fitted_on": row.fitted_on,
        "tested_on": row.tested_on,
    }


def _estimate(arguments: argparse.Namespace) -> tuple[Any, Sequence[str]]:
    from fleet.hardware.gpus import GIB, gpu  # noqa: PLC0415
    from fleet.hardware.latency.closed_loop import closed_loop  # noqa: PLC0415
    from fleet.hardware.latency.coefficients import estimate  # noqa: PLC0415
    from fleet.hardware.latency.prediction import BUDGET_TOKENS  # noqa: PLC0415
    from fleet.hardware.power import ERROR  # noqa: PLC0415
    from fleet.hardware.sharding import ShardingDegrees, shard_model  # noqa: PLC0415

    device = gpu(arguments.gpu, "--gpu")
    model = _stored(_model(arguments.model), arguments.weights, arguments.kv)
    way = ShardingDegrees(tp=arguments.tp, pp=arguments.pp, dp=arguments.dp, ep=arguments.ep)
    placement = shard_model(model, device, way)
    estimated = estimate(placement, arguments.backend)
    seen = closed_loop(
        estimated.step,
        estimated.client,
        concurrency=max(1.0, arguments.concurrency / way.dp),
        prompt_tokens=arguments.prompt,
        answer_tokens=arguments.answer,
        capacity_tokens=placement.kv_capacity_tokens() / way.dp,
        budget_tokens=BUDGET_TOKENS,
    )
    # requests per second of the whole replica
    rate = arguments.concurrency / (seen.ttft + arguments.answer * seen.tpot)
    drawn = _watts(placement, estimated.step, arguments.prompt, arguments.concurrency / way.dp, rate / way.dp)
    joules = drawn / (rate * arguments.answer)
    answer = {
        "model": model.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "gpus": way.gpus,
        "weights_gib_per_gpu": round(placement.weights_bytes / GIB, 2),
        "kv_capacity_tokens": placement.kv_capacity_tokens(),
        "ttft_ms": round(seen.ttft * 1e3, 1),
        "tpot_ms": round(seen.tpot * 1e3, 2),
        "answer_tokens_per_second": round(rate * arguments.answer, 1),
        "dollars_per_million_answer_tokens": _cost(placement, rate * arguments.answer),
        "price": f"{device.price.source}, {device.price.date}" if device.price is not None else None,
        "watts": round(drawn),
        "joules_per_answer_token": round(joules, 3),
        "power_error": ERROR,
        "basis": estimated.basis,
        "measurements": estimated.rows,
        "ttft_error": estimated.ttft_error,
        "tpot_error": estimated.tpot_error,
    }
    rests = {
        "model": f"{estimated.rows} measurements of this model there",
        "gpu": f"{estimated.rows} measurements of other models there",
        "engine": f"{estimated.rows} measurements on other GPUs",
    }[estimated.basis]
    lines = [
        (
            f"{model.name}: {model.parameters / 1e9:.1f}B parameters, {model.active_parameters / 1e9:.1f}B of them for a "
            f"token, {model.kv_bytes_per_token:,.0f} bytes of KV a token"
        ),
        (
            f"{way.gpus} x {device.name}: {placement.weights_bytes / GIB:.1f} GiB of weights each, room for "
            f"{placement.kv_capacity_tokens():,} tokens of KV"
        ),
        (
            f"{arguments.concurrency} at once, {arguments.prompt} + {arguments.answer} tokens: first token "
            f"{seen.ttft * 1e3:.0f} ms (± {estimated.ttft_error:.0%}), then {seen.tpot * 1e3:.1f} ms each "
            f"(± {estimated.tpot_error:.0%}); {rate * arguments.answer:,.0f} tokens/s"
        ),
        f"{drawn:,.0f} W (± {ERROR:.0%}, boards alone), {joules:.2g} J an answer token{_cost_in_words(answer)}",
        f"rests on {rests}; ± is the median error of such estimates",
    ]
    return answer, lines


def _model(named: Path) -> "ModelSizes":
    """Return the sizes of a model in a folder, or of a known repository."""
    from fleet.hardware.known_models import model_by_repository  # noqa: PLC0415
    from fleet.hardware.model_configs import read_model_config  # noqa: PLC0415

    known = None if named.exists() else model_by_repository(str(named))
    return read_model_config(named) if known is None else known.model


def _stored(model: "ModelSizes", weights: str | None, kv: str | None) -> "ModelSizes":
    import msgspec  # noqa: PLC0415

    from fleet.hardware.gpus import Number  # noqa: PLC0415

    precision: Precision = model.precision
    if weights is not None:
        precision = msgspec.structs.replace(precision, weights=Number(weights), experts=Number(weights))
    if kv is not None:
        precision = msgspec.structs.replace(precision, kv=Number(kv))
    return msgspec.structs.replace(model, precision=precision)


def _watts(placement: "ShardedModel", step: "StepModel", prompt: int, running: float, rate: float) -> float:
    """Return the power in watts of all GPUs of a replica.

    `running` is the number of requests that each of its data-parallel groups runs at a time, and `rate` the number that
    each group serves per second.
    """
    from fleet.hardware.latency.prediction import BUDGET_TOKENS  # noqa: PLC0415
    from fleet.hardware.latency.step_model import pairs  # noqa: PLC0415
    from fleet.hardware.power import power_share, watts  # noqa: PLC0415

    # share of the time in which prompts are computed
    prompts = min(1.0, rate * step.seconds(prompt, pairs(prompt, 0.0), 0.0, 0.0))
    share = prompts * power_share(min(prompt, BUDGET_TOKENS)) + (1 - prompts) * power_share(running)
    return placement.parallelism.gpus * watts(placement.gpu, share)


def _cost_in_words(answer: Mapping[str, Any]) -> str:
    if answer["price"] is None:
        return "; no price is known"
    return f", ${answer['dollars_per_million_answer_tokens']:.3g} a million of them ({answer['price']})"


def _cost(placement: "ShardedModel", tokens_per_second: float) -> float | None:
    price = placement.gpu.price
    if price is None:
        return None
    return round(price.dollars * placement.parallelism.gpus / 3600 / tokens_per_second * 1e6, 3)


def _print(answer: Any, lines: Sequence[str], destination: str | None) -> int:
    import msgspec  # noqa: PLC0415

    from fleet.cli.console.files import whole_file  # noqa: PLC0415

    if destination is None:
        print("\n".join(lines))
        return DONE
    text = msgspec.json.encode(answer).decode()
    if destination == "-":
        print(text)
        return DONE
    with whole_file(Path(destination), "--json") as path:
        path.write_text(text + "\n", encoding="utf-8")
    return DONE


def _command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
