"""The command line of `fleet`: help, completion, and what is refused before anything starts."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from fleet import config
from fleet.cli import doctor, up
from fleet.cli.main import run
from fleet.cli.status import uptime_words
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath, Role
from fleet.local.settings import Topology
from kvstore.protocol import versions


def options(*argv):
    import argparse

    parser = argparse.ArgumentParser()
    up.configure(parser)
    return up.read_topology(parser.parse_args(argv))


def test_help_loads_no_part_of_the_system():
    script = "import sys; from fleet.cli.main import run\ntry: run(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert "usage: fleet" in out
    for heavy in ("'grpc'", "'numpy'", "'msgspec'", "'asyncio'", "'torch'"):
        assert heavy not in out


def help_of(capsys, *command):
    with pytest.raises(SystemExit) as ended:
        run([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def sub_commands(text):
    """Return the names under COMMAND in a help text."""
    return re.findall(r"^    ([a-z-]+)(?: |$)", text.partition("COMMAND\n")[2].partition("\n\n")[0], re.MULTILINE)


def test_help_of_every_command_says_what_it_does(capsys):
    waiting, seen = [()], 0
    while waiting:
        command = waiting.pop()
        text = help_of(capsys, *command)
        sentence = text.partition("\n\n")[2].partition("\n\n")[0]
        assert sentence.endswith("."), (command, sentence)
        waiting += [(*command, name) for name in sub_commands(text)]
        seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["up", "--prefill", "-1"],
        ["up", "--decode", "many"],
        ["up", "--http-port", "65536"],
        ["up", "--kv-paths", "store,pigeon"],
        ["up", "--kv-paths", "store,store"],
        ["up", "--bogus"],
        ["up", "--gpu-memory-utilization", "1.5"],
        ["up", "--max-num-seqs", "0"],
        ["generate", "text", "--timeout", "nan"],
        ["generate", "text", "--timeout", "0"],
        ["serve", "router"],
        ["serve", "scheduler", "--config", "x"],
        ["generate"],
        ["generate", "text", "--max-tokens", "x"],
    ],
)
def test_a_misused_command_line_exits_2_with_one_line(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(argv)

    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["status", "--nosuch"], "fleet status: unrecognized arguments: --nosuch (see fleet status --help)"),
        (["generate", "hi", "--placement", "x"], "argument --placement: 'x' is none of auto, "),
        (["up", "--task", "rerank"], "argument --task: 'rerank' is none of auto, generate, embed, classify"),
        (["statsu"], "'statsu' is none of up, "),
        (["statsu"], "; did you mean 'status'?"),
        (["up", "--http-prot", "1"], "unrecognized arguments: --http-prot 1; did you mean '--http-port'?"),
        (["up", "--engin3=vllm"], "unrecognized arguments: --engin3=vllm; did you mean '--engine'?"),
        (
            ["up", "--quantization", "fp8"],
            "; an option of vLLM goes behind --vllm-arg, as in --vllm-arg quantization=fp8",
        ),
        (["up", "--enable-lora=true"], "as in --vllm-arg enable_lora=true"),
        (["up", "--enable-lora", "--demo", "x"], "as in --vllm-arg enable_lora=true"),
        (["up", "Qwen/Qwen3-0.6B"], "unrecognized arguments: Qwen/Qwen3-0.6B; did you mean --model Qwen/Qwen3-0.6B?"),
        (["up", "--prefil", "1"], "unrecognized arguments: --prefil 1; did you mean '--prefill'?"),
        (["generate", "hi", "--temp", "1"], "unrecognized arguments: --temp"),
        (["serve", "router", "--conf", "x"], "the following arguments are required: --config"),
        (["kube", "crdz"], "; did you mean 'crds'?"),
        (["kube", "crds", "--otput", "x"], "unrecognized arguments: --otput"),
        (["--nosuch"], "fleet: the following arguments are required: COMMAND"),
    ],
)
def test_misuse_names_what_would_do(argv, cause, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(argv)
    assert cause in capsys.readouterr().err


def test_bare_fleet_prints_its_help(capsys):
    assert run([]) == 0

    out, err = capsys.readouterr()
    assert out.startswith("usage: fleet ")
    assert "start a whole cluster on this machine" in out
    assert err == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_knows_commands_and_options(shell, capsys):
    assert run(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert "fleet" in script
    assert "doctor" in script
    assert "http-port" in script


def test_bash_completes_a_command_and_an_option(capsys):
    run(["completion", "bash"])
    script = capsys.readouterr().out

    assert completed(script, "fleet", "doc") == ["doctor"]
    assert completed(script, "fleet", "up", "--http") == ["--http-port"]


def completed(script, *words):
    """Return the completions that bash offers for the last word of a command line."""
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'; COMP_POINT=${{#COMP_LINE}}"
    call = "$(complete -p fleet | sed -E 's/.*-F ([^ ]+) .*/\\1/')"
    source = f'{script}\n{ask}\n{call} fleet "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    done = subprocess.run(["bash"], input=source, capture_output=True, text=True, check=True, timeout=60)
    return [each.strip() for each in done.stdout.split()]


@pytest.mark.parametrize(
    ("file", "cause"), [("missing/ready.json", "its folder does not exist"), (".", "is a folder; name a file in it")]
)
def test_unwritable_ready_file_is_refused_before_start(tmp_path, file, cause, capsys):
    assert run(["up", "--engine", "simulated", "--ready-file", str(tmp_path / file)]) == 3

    assert capsys.readouterr().err == f"fleet: --ready-file: {tmp_path / file}: {cause}\n"


def test_ready_descriptor_must_be_open(tmp_path, capsys):
    assert run(["serve", "router", "--config", str(tmp_path), "--ready-fd", "9999"]) == 3

    assert capsys.readouterr().err == "fleet: --ready-fd: 9999: Bad file descriptor\n"


def test_a_heartbeat_needs_somewhere_to_be_written(tmp_path, capsys):
    assert run(["serve", "router", "--config", str(tmp_path), "--heartbeat"]) == 3

    assert capsys.readouterr().err == "fleet: --heartbeat: needs --ready-fd, where it is written\n"


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert capsys.readouterr().out == f"fleet {version('fleet-serving')}\n"


def test_version_of_a_program_that_is_not_installed_is_unknown(monkeypatch, capsys):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    versions.own_protocols.cache_clear()
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    versions.own_protocols.cache_clear()
    assert capsys.readouterr().out == "fleet of an unknown version\n"


def test_closed_output_pipe_ends_without_traceback():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fleet.cli.main --help | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_refused_configuration_exits_3_with_one_line(tmp_path, capsys):
    path = tmp_path / "topology.toml"
    path.write_text("[cluster]\nengin = 'vllm'\n")

    assert run(["up", "--config", str(path)]) == 3

    captured = capsys.readouterr()
    assert captured.err == f"fleet: {path}: cluster.engin: is not a known key; did you mean 'engine'?\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--engine", "steam"], "fleet: cluster.engine: 'steam' is not one of simulated, vllm"),
        (["--engine", "simulated", "--model", "/nowhere"], "fleet: cluster.model: /nowhere is not a folder"),
        (
            ["--engine", "simulated", "--prefill", "0", "--decode", "0"],
            "fleet: pools: no worker is left to start",
        ),
        (
            ["--engine", "simulated", "--decode", "0"],
            "fleet: pools: prefill workers need workers of role decode or both to hand over to",
        ),
    ],
)
def test_invalid_topology_is_refused_before_start(argv, line, capsys):
    assert run(["up", "--http-port", "0", "--grpc-port", "0", *argv]) == 3

    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("[cluster.adapters]\nlegal = 'nowhere'\n", "cluster.adapters.legal: {folder}/nowhere is not a folder"),
        ("[cluster]\nengine = 'simulated'\n[cluster.adapters]\ntiny = 'x'\n", "adapters: each needs a name of its own"),
    ],
)
def test_missing_lora_adapters_are_refused_before_start(tmp_path, content, cause, capsys):
    path = tmp_path / "topology.toml"
    path.write_text(content)

    assert run(["up", "--config", str(path), "--http-port", "0", "--grpc-port", "0"]) == 3

    assert cause.format(folder=tmp_path) in capsys.readouterr().err


def test_options_override_the_file(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text("[cluster]\nengine = 'vllm'\n[[pools]]\nrole = 'decode'\nreplicas = 5\nmax_running = 3\n")

    topology = options(
        "--config", str(path), "--engine", "simulated", "--prefill", "2", "--decode", "1", "--http-port", "0"
    )

    assert topology.cluster.engine == "simulated"
    assert topology.replicas(Role.PREFILL) == 2
    assert topology.replicas(Role.DECODE) == 1
    assert next(pool for pool in topology.pools if pool.role is Role.DECODE).max_running == 3
    assert topology.router.http_listen == "127.0.0.1:0"
    assert topology.router.grpc_listen == "127.0.0.1:50051"


def test_both_ways_can_be_opened():
    assert options("--kv-paths", "store,direct").cluster.kv_paths == (KvPath.STORE, KvPath.DIRECT)


def test_count_option_is_refused_for_several_pools_of_a_role(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text("[[pools]]\nrole = 'decode'\n[[pools]]\nrole = 'decode'\nmax_running = 3\n")

    with pytest.raises(ConfigurationRefused, match="--decode: the topology has 2 pools of that role"):
        options("--config", str(path), "--decode", "1")


def test_a_name_that_a_terminal_would_obey_is_spelled_out(tmp_path, capsys):
    file = tmp_path / "a\n\x1b[31m.toml"
    assert run(["sim", "run", str(file)]) == 3
    assert capsys.readouterr().err == f"fleet: {tmp_path}/a\\n\\x1b[31m.toml: No such file or directory\n"


def test_a_file_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch, capsys):
    def save(settings, path):
        monkeypatch.setattr(Path, "write_bytes", lambda _path, _content: os.write(full, b"{}"))
        config.save(settings, path)

    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(doctor, "run", lambda _: save(Topology(), tmp_path / "router.json"))
    assert run(["doctor"]) == 1
    os.close(full)
    assert capsys.readouterr() == ("", f"fleet: {tmp_path}/router.json: No space left on device\n")


def test_output_that_a_full_disk_does_not_take_is_one_line(tmp_path):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "fleet.cli.main", "hardware", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (1, b"fleet: standard output: No space left on device\n")


def test_watch_and_json_exclude_each_other(capsys):
    assert run(["status", "--watch", "--json"]) == 3

    assert capsys.readouterr().err == "fleet: --watch: shows tables, so it cannot go with --json\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3660, "1 h 1 min"), (90_000, "1 d 1 h")]
)
def test_uptime_has_its_two_largest_units(seconds, words):
    assert uptime_words(seconds) == words
