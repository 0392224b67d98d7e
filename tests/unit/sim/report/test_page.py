"""Page of a report: which settings it shows."""

import msgspec

from fleet.router.settings.router import RouterSettings
from fleet.sim.report.page import chosen_settings
from kvstore.tracing.settings import TracingSettings


def test_page_shows_no_settings_that_may_hold_passwords():
    settings = RouterSettings(
        policy="round_robin",
        tenants_redis="redis://:hidden@redis.example.com/0",
        tracing=TracingSettings(endpoint="https://traces.example.com", headers={"authorization": "hidden"}),
    )

    shown = msgspec.json.encode(chosen_settings(settings))

    assert b"round_robin" in shown
    assert b"hidden" not in shown
