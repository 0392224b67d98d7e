"""What router processes behind the same ports are told."""

import msgspec
import pytest

from fleet.local.router_processes import plan_routers
from fleet.router.settings.router import RouterSettings

LOCAL = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}


def told(folder, **settings):
    """Settings of three processes."""
    folder.mkdir()
    plan_routers(RouterSettings(**LOCAL, **settings), 3, folder)
    return [msgspec.json.decode(file.read_bytes(), type=RouterSettings) for file in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("secrets", "common"),
    [({"tenant_secret": "t"}, "t"), ({"prompt_secret": "p"}, "p"), ({"tenant_secret": "t", "prompt_secret": "p"}, "p")],
)
def test_processes_have_the_secret_in_common_that_other_hosts_have(tmp_path, secrets, common):
    assert [each.prompt_secret for each in told(tmp_path / "r", **secrets)] == [common] * 3


def test_where_none_is_given_one_is_drawn_that_others_cannot_read(tmp_path):
    first, second = ({each.prompt_secret for each in told(tmp_path / name)} for name in "ab")

    assert len(first) == len(second) == 1
    assert first != second
    assert min(len(secret) for secret in first | second) >= 32
    assert all(file.stat().st_mode & 0o77 == 0 for file in tmp_path.glob("*/*.json"))
