"""Power of GPUs: the model agrees with published figures, and every figure has a source."""

import pytest

from fleet.core.roles import Role
from fleet.hardware.gpus import gpu, gpus
from fleet.hardware.power import ERROR, MOST, PUBLISHED, loaded_watts, power_share, watts


@pytest.mark.parametrize("drawn", PUBLISHED, ids=lambda drawn: f"{drawn.gpu}-{drawn.tokens}-{drawn.watts}")
def test_published_figures_lie_within_stated_error(drawn):
    assert watts(gpu(drawn.gpu), power_share(drawn.tokens)) == pytest.approx(drawn.watts, rel=ERROR)


def test_larger_steps_draw_more_up_to_a_limit():
    drawn = [power_share(tokens) for tokens in (0, 1, 2, 16, 128, 8192, 1 << 20)]

    assert drawn == sorted(drawn)
    assert drawn[0] == drawn[1] > 0
    assert drawn[-1] == MOST < 1


@pytest.mark.parametrize("name", list(gpus()))
def test_loaded_gpu_for_both_phases_draws_the_mean(name):
    prefill, decode, both = (loaded_watts(gpu(name), role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))

    assert gpu(name).idle_watts < decode < both < prefill < gpu(name).watts
    assert both == pytest.approx((prefill + decode) / 2)


@pytest.mark.parametrize("name", list(gpus()))
def test_idle_power_is_below_limit_and_has_source(name):
    device = gpu(name)

    assert 0.1 * device.watts < device.idle_watts < 0.35 * device.watts
    assert watts(device, 0.0) == device.idle_watts
    assert device.idle_source.startswith(("assumption: ", f"{device.idle_watts:g} W "))


@pytest.mark.parametrize("name", [name for name, device in gpus().items() if device.price is not None])
def test_price_has_source_and_date(name):
    price = gpu(name).price

    assert price.source
    assert len(price.date) == len("2025-06")
