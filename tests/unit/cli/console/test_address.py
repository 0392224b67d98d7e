"""Error messages of commands if no cluster is found, and for invalid addresses, keys and prompts."""

import socket
import sys
from contextlib import closing

import pytest

from fleet.cli.generate import summary
from fleet.cli.main import run
from fleet.client import Result
from fleet.core.requests import Finish, Usage

OPERATING = (["status"], ["explain", "x"], ["router", "thresholds"])


@pytest.fixture
def nobody():
    """Yield an address at which no server listens."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("command", OPERATING, ids=lambda command: command[0])
def test_unknown_control_address_is_reported_with_advice(command, nobody, capsys):
    assert run([*command, "--address", nobody]) == 1

    out, error = capsys.readouterr()
    assert not out
    assert error.startswith(
        f"fleet: {nobody}: the control address of the router is not known: no control socket was found for it in "
    )
    assert "--control-secret-file" in error
    assert "--control-address" in error
    assert "fleet up" in error


@pytest.mark.parametrize("command", OPERATING, ids=lambda command: command[0])
def test_a_control_address_without_a_listener_is_named(command, nobody, capsys):
    assert run([*command, "--control-address", nobody]) == 1

    hint = "--control-address names a router's control_listen"
    assert capsys.readouterr().err == f"fleet: {nobody}: nobody listens there; {hint}\n"


def test_a_control_socket_that_is_not_there_is_named(tmp_path, capsys):
    gone = f"unix:{tmp_path / 'gone'}"

    assert run(["status", "--control-address", gone]) == 1

    hint = "--control-address names a router's control_listen"
    assert capsys.readouterr().err == f"fleet: {gone}: nobody listens there; {hint}\n"


def test_an_unreadable_control_secret_is_refused(tmp_path, capsys):
    gone = tmp_path / "gone"

    assert run(["status", "--control-address", "127.0.0.1:9", "--control-secret-file", str(gone)]) == 3

    assert f"control_credentials.secret_file: {gone} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "option"), [("127.0.0.1:50051", ""), ("h:1", " --address h:1"), ("[::1]:9", " --address '[::1]:9'")]
)
def test_hint_names_an_address_that_is_not_the_default(address, option):
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2)
    result = Result(
        request_id="x", model="m", text="", token_ids=(), logprobs=(), finish=Finish.LENGTH, usage=usage, kv=()
    )

    *_, hint = summary(result, address)

    assert hint == f"fleet explain x{option} says why there"


def test_unreachable_address_is_reported_with_advice(nobody, capsys):
    assert run(["generate", "hi", "--address", nobody]) == 1

    assert capsys.readouterr() == (
        "",
        f"fleet: {nobody}: nobody listens there; fleet up starts a cluster on this machine, --address names another's router\n",
    )


@pytest.mark.parametrize("address", ["", ":", "nonsense", "127.0.0.1", "127.0.0.1:0", "h:99999", "http://h:1", "h:x"])
def test_invalid_address_is_misuse(address, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(["status", "--address", address])

    (line,) = capsys.readouterr().err.splitlines()
    assert f"{address!r} is not HOST:PORT, as in 127.0.0.1:50051" in line


def test_unknown_host_name_is_reported(capsys):
    assert run(["generate", "hi", "--address", "nobody.invalid:1"]) == 1
    assert "nobody.invalid:1: there is no host of that name; " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused(key, nobody, capsys):
    assert run(["generate", "hi", "--api-key", key, "--address", nobody]) == 3
    assert capsys.readouterr().err.startswith("fleet: --api-key: ")


def test_standard_input_that_is_closed_or_no_text_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for errors in ("strict", "surrogateescape"):
        with (tmp_path / "bytes").open(errors=errors) as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert run(["generate", "-"]) == 3
            assert capsys.readouterr().err == "fleet: standard input: is no text (UTF-8)\n"
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["generate", "-"]) == 3
    assert "standard input is closed" in capsys.readouterr().err
