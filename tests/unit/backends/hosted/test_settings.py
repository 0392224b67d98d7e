"""Overflow in router settings: each error is one line with the key."""

import pytest

from fleet.app.router import SERVICE
from fleet.config import load
from fleet.core.errors import ConfigurationRefused
from fleet.local.router_processes import plan_routers
from fleet.router.settings.router import RouterSettings

OVERFLOW = """
[overflow.tiny]
url = "https://api.example.com"
dollars_per_hour = 5
dollars_per_million_prompt_tokens = 0.5
dollars_per_million_answer_tokens = 1.5
"""


def test_short_section_is_enough(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text(OVERFLOW)
    hosted = load(file, RouterSettings).overflow["tiny"]
    assert (hosted.after_seconds, hosted.max_answer_tokens, hosted.hosted_model) == (5.0, 4096, "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OVERFLOW.replace("https:", "ftp:"), "overflow.tiny: url: 'ftp:"),
        (
            OVERFLOW.replace("https://", "https://me@"),
            "overflow.tiny: url: must hold no user name and no password; use api_key_file",
        ),
        (OVERFLOW.replace("https://", "https://:password@"), "overflow.tiny: url: must hold no user name and no"),
        (OVERFLOW.replace("= 5", "= 0"), "overflow.tiny.dollars_per_hour"),
        (OVERFLOW.replace("= 5", "= nan"), "overflow.tiny.dollars_per_hour"),
        (OVERFLOW.replace("= 5", "= inf"), "overflow.tiny.dollars_per_hour"),
        (OVERFLOW.replace("= 0.5", "= -1"), "overflow.tiny.dollars_per_million_prompt_tokens"),
        (OVERFLOW.replace("= 0.5", "= 0").replace("= 1.5", "= 0"), "dollars_per_million_answer_tokens: one of the two"),
        (OVERFLOW.replace("dollars_per_hour = 5", ""), "dollars_per_hour"),
        (OVERFLOW + "after_seconds = 20\n", "overflow.tiny.after_seconds: 20 is above max_queue_seconds (10)"),
        (OVERFLOW + 'excluded_tenants = ["acme"]\n', "overflow.tiny.excluded_tenants: 'acme' is not in `tenants`"),
        (OVERFLOW + 'api_key = "sk"\n', "overflow.tiny.api_key: is not a known key"),
        (OVERFLOW + "max_running = 0\n", "overflow.tiny.max_running"),
    ],
)
def test_error_names_the_key(tmp_path, content, said):
    file = tmp_path / "router.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationRefused) as caught:
        load(file, RouterSettings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "overflow.tiny: `models` has no such model; there are: none"),
        (
            'api_key_file = "FOLDER/none"\n[models]\ntiny = "MODEL"\n',
            "overflow.tiny.api_key_file: FOLDER/none: No such",
        ),
        ('api_key_file = "FOLDER/two"\n[models]\ntiny = "MODEL"\n', "overflow.tiny.api_key_file: FOLDER/two: it must"),
        ('ledger = "FOLDER/no/x"\n[models]\ntiny = "MODEL"\n', "overflow.tiny.ledger: FOLDER/no/x: No such"),
    ],
)
async def test_unusable_file_or_model_refuses_the_start(tmp_path, model_dir, more, said):
    (tmp_path / "two").write_text("one two")
    file = tmp_path / "router.toml"
    file.write_text(
        'http_listen = "127.0.0.1:0"\ngrpc_listen = "127.0.0.1:0"\n'
        + OVERFLOW
        + more.replace("FOLDER", str(tmp_path)).replace("MODEL", str(model_dir))
    )
    with pytest.raises(ConfigurationRefused) as caught:
        await SERVICE.run(load(file, RouterSettings), lambda _: None)
    assert said.replace("FOLDER", str(tmp_path)) in str(caught.value)


def test_router_processes_share_one_ledger(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text('http_listen = "127.0.0.1:0"\ngrpc_listen = "127.0.0.1:0"\n' + OVERFLOW)
    folder = tmp_path / "run"
    folder.mkdir()
    plan_routers(load(file, RouterSettings), 3, folder)
    told = [load(each, RouterSettings) for each in sorted(folder.glob("router-*.json"))]
    ledgers = {each.overflow["tiny"].ledger for each in told}
    assert len(told) == 3
    assert len(ledgers) == 1
    assert all(ledgers)
