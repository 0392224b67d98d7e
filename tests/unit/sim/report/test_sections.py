"""Tests of the sections of a report."""

from types import SimpleNamespace

from fleet.sim.report.sections import pools

POOL = SimpleNamespace(
    name="decode",
    gpu="h100",
    gpus=2,
    utilisation=0.5,
    imbalance=1.0,
    computed_tokens=600,
    generated_tokens=400,
    gpu_hours=1.0,
    cost=1.0,
    cost_per_million_tokens=1000.0,
    energy_kwh=1.0,
    joules_per_token=3600.0,
)


def test_figures_per_token_say_which_tokens_they_divide_by():
    """Check the column heads of a pool: cost and energy are divided by the tokens that the pool has computed or generated."""
    (table,) = pools([POOL]).tables

    per_token = [head for head in table.head if "token" in head and ("$" in head or "J" in head)]
    assert per_token == ["$ a million computed or generated tokens", "J a computed or generated token"]
    assert [len(row) for row in table.rows] == [len(table.head)]
