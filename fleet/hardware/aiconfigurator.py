"""aiconfigurator: reads public measurements of engines from NVIDIA's Python wheel `aiconfigurator-core`.

`pip download aiconfigurator-core==0.12.0 --no-deps` fetches the wheel, a zip archive under Apache-2.0.

The file `systems/silicon_sample.csv` in the wheel has 5,221 rows from several collections of measurements. Some
collections contradict others. This module corrects the rows in this way:

1. In two collections ("2026-04-06" and "db-dump"), the stated tensor-parallel or data-parallel degree is multiplied by
   the expert-parallel degree. The collection "2026-03-25" has the same measurements with the true degrees.
   This module corrects the aggregated rows of the two collections that have expert parallelism. It divides the product
   of the two stated degrees by the expert-parallel degree, which gives the number of GPUs.
2. In these two collections, some aggregated rows of vLLM with expert parallelism are wrongly marked as data-parallel
   attention: they state as many data-parallel as tensor-parallel ranks. This module reads these rows as tensor-parallel
   attention. The batch size in these rows counts the requests of only one of the stated data-parallel ranks, so it is too
   small. This module does not correct the batch size, and uses it only if rule 3 needs it.
3. The concurrency is taken from the column `silicon_data_source`, or computed from the batch size if that column does
   not contain it.
4. DeepSeek-R1 and DeepSeek-V3 count as one model, and so do checkpoints of one model in different precisions.
5. Disaggregated rows that do not state the numbers of workers cannot be predicted. They are counted and left out.
6. Speculative decoding is not recorded, although some rows of DeepSeek-R1 must have used it. This contributes to the
   errors of the predictions.
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number
from fleet.hardware.latency.measurements import MeasuredPhase, MeasuredRole, Measurement, distinct
from fleet.hardware.models import ModelSizes, Precision, read_model
from fleet.hardware.sharding import ShardingDegrees

ROOT = "aiconfigurator_core"
SAMPLE = f"{ROOT}/systems/silicon_sample.csv"

GPUS = {
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
}

CONFIGS = {
    "DeepSeek": ("deepseek-v3", "deepseek-ai--DeepSeek-R1"),
    "GLM-5": ("glm-5", "zai-org--GLM-5"),
    "Kimi-K2.5": ("kimi-k2.5", "moonshotai--Kimi-K2.5"),
    "Llama-3.1-70B": ("llama-3.1-70b", "meta-llama--Meta-Llama-3.1-70B"),
    "Llama-3.1-8B": ("llama-3.1-8b", "meta-llama--Meta-Llama-3.1-8B"),
    "MiniMax-M2.5": ("minimax-m2.5", "MiniMaxAI--MiniMax-M2.5"),
    "Qwen3-235B": ("qwen3-235b", "Qwen--Qwen3-235B-A22B"),
    "Qwen3-32B": ("qwen3-32b", "Qwen--Qwen3-32B"),
    "Qwen3.5-397B": ("qwen3.5-397b", "Qwen--Qwen3.5-397B-A17B"),
    "gpt-oss-120b": ("gpt-oss-120b", "openai--gpt-oss-120b"),
}
"""Maps a part of the model path in a measurement to two names: the model's name in Fleet, and the name of the model's
config file in the wheel."""

NUMBERS = {"fp8": Number.FP8, "fp8_block": Number.FP8, "nvfp4": Number.FP4, "int4_wo": Number.INT4, "": Number.BF16}

MULTIPLIED = ("2026-04-06", "db-dump")


class Sample(Struct, frozen=True, kw_only=True):
    """Holds the measurements and the model sizes that were read from the wheel."""

    rows: int
    measurements: tuple[Measurement, ...]  # without duplicates and without incomplete measurements
    # Sizes by model. Their precision is always bf16; each measurement states its real precision.
    models: dict[str, ModelSizes]
    # Number of distinct measurements that were left out, because their model is not in `CONFIGS`, or because they do not
    # state the concurrency, the parallelism or the numbers of workers.
    left_out: int


def read_sample(wheel: Path) -> Sample:
    """Read all measurements of a wheel.

    Raises:
        ConfigurationRefused: The file does not exist, or is not a wheel of aiconfigurator-core; the message names the
            file. Or the wheel has measurements of a GPU type that is not in `GPUS`; the message names the type.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            text = io.TextIOWrapper(archive.open(SAMPLE), encoding="utf-8", newline="")
            rows = list(csv.DictReader(text))
            models = {
                name: read_model(
                    json.loads(archive.read(f"{ROOT}/model_configs/{config}_config.json")), name, precision=Precision()
                )
                for name, config in CONFIGS.values()
            }
            measurements = distinct(measured for row in rows if (measured := _measurement(row)) is not None)
            unknown = {
                (_gpu(row), row["backend"], float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
                for row in rows
                if _measurement(row) is None
            } - {(each.gpu, each.backend, each.ttft_ms, each.tpot_ms) for each in measurements}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigurationRefused(
            f"{wheel}: is not an aiconfigurator-core wheel that can be read ({error}); get one with "
            "`pip download aiconfigurator-core==0.12.0 --no-deps`"
        ) from error
    return Sample(rows=len(rows), measurements=tuple(measurements), models=models, left_out=len(unknown))


def _gpu(row: Mapping[str, str]) -> str:
    if (gpu := GPUS.get(row["system"])) is None:
        raise ConfigurationRefused(
            f"the wheel has measurements of a GPU type that is unknown here: {row['system']!r:.50}"
        )
    return gpu


def _measurement(row: Mapping[str, str]) -> Measurement | None:
    name = next((name for part, (name, _) in CONFIGS.items() if part in row["model_path"]), None)
    sides = list(_sides(row))
    concurrency = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    batch = row["batch_size"] or row["decode_batch_size"]
    if name is None or not sides or not (concurrency or batch):
        return None
    prefill, decode = sides[0], sides[-1]
    groups = decode.workers * decode.parallelism.dp
    return Measurement(
        gpu=_gpu(row),
        backend=row["backend"],
        version=row["backend_version"],
        model=name,
        precision=_precision(row, name),
        client=_client(row["silicon_data_source"]),
        concurrency=int(concurrency[1]) if concurrency else int(batch) * groups,
        prompt_tokens=int(row["isl"]),
        answer_tokens=int(row["osl"]),
        prefill=prefill,
        decode=decode,
        phase=MeasuredPhase.AGGREGATED if row["mode"] == "agg" else MeasuredPhase.DISAGGREGATED,
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def _client(source: str) -> str:
    """Return the benchmark that made a measurement: `inferencex`, or `authors` for the benchmark of the wheel's authors."""
    return "authors" if "auto-gap-analysis" in source else "inferencex"


def _precision(row: Mapping[str, str], name: str) -> Precision:
    weights, experts = NUMBERS[row["gemm_quant_mode"]], NUMBERS[row["moe_quant_mode"]]
    if name == "gpt-oss-120b":  # this model was published with 4-bit experts and all other weights in bf16
        weights, experts = Number.BF16, Number.FP4
    if weights is Number.INT4:  # only Kimi's checkpoint has INT4, and only for its experts
        weights = Number.BF16
    narrow = weights is not Number.BF16 or experts in (Number.FP4, Number.FP8)
    return Precision(weights=weights, experts=experts, kv=Number.FP8 if narrow else Number.BF16)


def _sides(row: Mapping[str, str]) -> Iterator[MeasuredRole]:
    if row["mode"] == "agg":
        if row["tp_size"]:
            yield MeasuredRole(parallelism=_parallelism(row, ""))
        return
    for role in ("prefill_", "decode_"):
        if not row[f"{role}num_workers"]:
            return
    for role in ("prefill_", "decode_"):
        yield MeasuredRole(parallelism=_parallelism(row, role), workers=int(row[f"{role}num_workers"]))


def _parallelism(row: Mapping[str, str], role: str) -> ShardingDegrees:
    tp = int(row[f"{role}tp_size"])
    dp = max(1, int(row[f"{role}attention_dp_size"] or 1))
    ep = max(1, int(row[f"{role}moe_ep_size"] or 1))
    pp = int(row[f"{role}pp_size"])
    source = row["silicon_data_source"]
    multiplied = any(each in source for each in MULTIPLIED) and row["mode"] == "agg" and ep > 1
    if multiplied and row["backend"] == "vllm" and tp == dp:
        return ShardingDegrees(tp=tp, pp=pp, ep=tp)
    if multiplied:
        gpus = tp * dp // ep
        tp, dp, ep = (1, gpus, gpus) if dp > 1 else (gpus, 1, gpus)
    if ep not in (1, tp * dp):
        ep = 1  # experts are sliced: every GPU has a part of each expert
    return ShardingDegrees(tp=tp, pp=pp, dp=dp, ep=ep)
