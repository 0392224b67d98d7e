"""Rows of the public sample of measurements: how they are read, corrected and distinguished."""

import csv
import io
import json
import zipfile

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.aiconfigurator import CONFIGS, ROOT, SAMPLE, read_sample
from fleet.hardware.gpus import Number
from fleet.hardware.latency.measurements import MeasuredPhase
from fleet.hardware.models import Precision
from fleet.hardware.sharding import ShardingDegrees
from tests.support.sim.model_configs import DEEPSEEK_V3, LLAMA_70B

ROLES = ("", "prefill_", "decode_")
CUTS = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
COLUMNS = [
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode"),
    *("isl", "osl", "gemm_quant_mode", "moe_quant_mode", "batch_size"),
    *(f"{role}{cut}" for role in ROLES for cut in CUTS),
    *("prefill_num_workers", "decode_batch_size", "decode_num_workers", "silicon_ttft_ms", "silicon_tpot_ms"),
]


def a_row(**changes):
    row = {
        "silicon_data_source": "source_file=2026-03-25.csv; silicon_concurrency=32",
        "backend": "vllm",
        "backend_version": "0.18.0",
        "model_path": "meta-llama/Llama-3.1-70B",
        "system": "h100_sxm",
        "mode": "agg",
        "isl": "1024",
        "osl": "512",
        "gemm_quant_mode": "fp8",
        "moe_quant_mode": "fp8",
        "batch_size": "32",
        "tp_size": "8",
        "pp_size": "1",
        "attention_dp_size": "1",
        "silicon_ttft_ms": "150.5",
        "silicon_tpot_ms": "12.5",
    }
    return row | changes


@pytest.fixture
def wheel(tmp_path):
    def make(*rows):
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
        path = tmp_path / "wheel.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(SAMPLE, text.getvalue())
            for name, config in CONFIGS.values():
                content = DEEPSEEK_V3 if name == "deepseek-v3" else LLAMA_70B
                archive.writestr(f"{ROOT}/model_configs/{config}_config.json", json.dumps(content))
        return path

    return make


def only(wheel):
    [measured] = read_sample(wheel).measurements
    return measured


def test_a_row_becomes_a_measurement(wheel):
    measured = only(wheel(a_row()))

    assert (measured.gpu, measured.backend, measured.model) == ("h100", "vllm", "llama-3.1-70b")
    assert (measured.prompt_tokens, measured.answer_tokens, measured.concurrency) == (1024, 512, 32)
    assert measured.decode.parallelism == ShardingDegrees(tp=8)
    assert measured.precision == Precision(weights=Number.FP8, experts=Number.FP8, kv=Number.FP8)
    assert (measured.ttft_ms, measured.tpot_ms, measured.phase) == (150.5, 12.5, MeasuredPhase.AGGREGATED)


def test_where_no_concurrency_is_written_the_batch_counts(wheel):
    assert only(wheel(a_row(silicon_data_source="elsewhere", batch_size="7"))).concurrency == 7


@pytest.mark.parametrize(
    ("cuts", "meant"),
    [
        ({"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, ShardingDegrees(tp=8, ep=8)),
        (
            {"tp_size": "1", "attention_dp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"},
            ShardingDegrees(dp=4, ep=4),
        ),
        ({"tp_size": "8", "moe_tp_size": "8", "moe_ep_size": "1"}, ShardingDegrees(tp=8)),
    ],
    ids=["tensor", "attention groups", "as it says"],
)
def test_multiplied_ranks_are_divided_again(wheel, cuts, meant):
    row = a_row(silicon_data_source="source_file=2026-04-06.csv; silicon_concurrency=32", backend="trtllm", **cuts)

    assert only(wheel(row)).decode.parallelism == meant


def test_vllm_with_expert_parallelism_has_one_attention_group(wheel):
    row = a_row(
        silicon_data_source="db-dump/2026-04-27; silicon_concurrency=64",
        tp_size="4",
        attention_dp_size="4",
        moe_tp_size="1",
        moe_ep_size="16",
        batch_size="16",
    )

    assert only(wheel(row)).decode.parallelism == ShardingDegrees(tp=4, ep=4)
    assert only(wheel(row)).concurrency == 64


def test_one_model_under_two_names_is_one_measurement(wheel):
    names = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")

    assert only(wheel(*(a_row(model_path=name) for name in names))).model == "deepseek-v3"


def test_disaggregated_rows_without_workers_are_left_out(wheel):
    sides = {f"{role}{cut}": "1" for role in ROLES[1:] for cut in CUTS}
    complete = a_row(mode="disagg", prefill_num_workers="2", decode_num_workers="3", **sides)
    unclear = a_row(mode="disagg", silicon_ttft_ms="99", **sides)

    sample = read_sample(wheel(complete, unclear))

    assert [(each.prefill.workers, each.decode.workers) for each in sample.measurements] == [(2, 3)]
    assert (sample.rows, sample.left_out) == (2, 1)


def test_unknown_gpu_in_a_wheel_is_refused_by_name(wheel):
    with pytest.raises(ConfigurationRefused, match="a GPU type that is unknown here: 'h900_sxm'"):
        read_sample(wheel(a_row(), a_row(system="h900_sxm")))


def test_what_is_no_wheel_is_refused_by_name(tmp_path):
    (tmp_path / "x.whl").write_text("nothing of the kind")

    for name in ("x.whl", "absent.whl"):
        with pytest.raises(ConfigurationRefused, match=f"{name}: is not an aiconfigurator-core wheel"):
            read_sample(tmp_path / name)
