"""Settings of router processes behind the same ports."""

import msgspec
import pytest

from fleet.local.router_processes import plan_routers
from fleet.router.settings.router import RouterSettings

LOCAL = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}


def told(folder, **settings):
    """Return the settings of three router processes that `plan_routers` writes."""
    folder.mkdir()
    plan_routers(RouterSettings(**LOCAL, **settings), 3, folder)
    return [msgspec.json.decode(file.read_bytes(), type=RouterSettings) for file in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("secrets", "common"),
    [({"tenant_secret": "t"}, "t"), ({"prompt_secret": "p"}, "p"), ({"tenant_secret": "t", "prompt_secret": "p"}, "p")],
)
def test_processes_share_the_configured_secret(tmp_path, secrets, common):
    assert [each.prompt_secret for each in told(tmp_path / "r", **secrets)] == [common] * 3


def test_missing_secret_is_drawn_and_private(tmp_path):
    first, second = ({each.prompt_secret for each in told(tmp_path / name)} for name in "ab")

    assert len(first) == len(second) == 1
    assert first != second
    assert min(len(secret) for secret in first | second) >= 32
    assert all(file.stat().st_mode & 0o77 == 0 for file in tmp_path.glob("*/*.json"))
