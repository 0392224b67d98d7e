"""`fleet config`: the list of all settings, their schemas, and checks of files."""

import json

import jsonschema
import msgspec
import pytest

from fleet.app.settings_reference import KINDS, settings_keys
from fleet.cli.main import run
from tests.support.sim.pipes import a_pipe


def printed(capsys, *argv, status=0):
    assert run(["config", *argv]) == status
    return capsys.readouterr()


@pytest.mark.parametrize("part", KINDS)
def test_list_has_every_key_of_a_part(part, capsys):
    out = printed(capsys, part).out

    for field in msgspec.structs.fields(KINDS[part]):
        assert f"\n{field.encode_name}  " in out


def test_list_gives_meaning_unit_and_default(capsys):
    lines = printed(capsys, "router").out.splitlines()

    at = lines.index("max_queue_seconds  default: 10.0  [seconds]")
    assert lines[at + 1].startswith(
        "    A request is rejected at once if it would wait longer than this for its first token"
    )
    assert "tenants.NAME.requests_per_minute  default: 0.0  [per minute]" in lines


@pytest.mark.parametrize("part", KINDS)
def test_unit_of_a_rate_is_no_plain_amount(part):
    rates = {key.path: key.unit for key in settings_keys(KINDS[part]) if "_per_" in key.path.rpartition(".")[2]}

    assert {path: unit for path, unit in rates.items() if unit and "per " not in unit} == {}


def test_list_shows_sections_inside_arrays(capsys):
    out = printed(capsys, "up").out

    assert "\npools[].role  required\n" in out
    assert "\nrouter.http.max_body_bytes  " in out


def test_schemas_accept_what_the_loader_accepts(capsys):
    schemas = json.loads(printed(capsys, "--json").out)

    assert list(schemas) == list(KINDS)
    router = schemas["router"]
    jsonschema.validate({"max_queue_seconds": 3.0, "tenants": {"acme": {"weight": 2}}}, router)
    with pytest.raises(jsonschema.ValidationError, match="max_queue_secs"):
        jsonschema.validate({"max_queue_secs": 3.0}, router)
    key = router["$defs"]["RouterSettings"]["properties"]["max_queue_seconds"]
    assert key["description"].startswith("A request is rejected at once")
    assert (key["default"], key["x-unit"]) == (10.0, "seconds")


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("max_queued = 3\nhttp_listen = '127.0.0.1:0'\n", "fleet serve router"),
        ("[cluster]\nengine = 'simulated'\n", "fleet up"),
        ("", "fleet up"),
    ],
)
def test_check_finds_the_part_by_the_keys(content, command, tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(content)

    assert printed(capsys, "--check", str(file)).out == f"{file}: a valid settings file of {command}\n"


@pytest.mark.parametrize(
    ("argv", "content", "cause"),
    [
        ([], "max_queued = 3\nhttp_lisen = 'x'\n", "http_lisen: is not a known key"),
        (["router"], "[cluster]\n", "cluster: is not a known key"),
        ([], "[router]\nmax_que = 3\n", "router.max_que: is not a known key; did you mean 'max_queued'?"),
        (
            [],
            "[[pools]]\nrole = 'both'\n[pools.vllm]\ndtyp = 'x'\n",
            "pools[0].vllm.dtyp: is not a known key; did you mean 'dt",
        ),
        (
            [],
            "[[store.tiers]]\nkind = 'ssd'\ndirectory = []\n",
            "directory: is not a known key; did you mean 'directories'?",
        ),
        (
            [],
            "[router.tenants.acme]\nweigth = 1\n",
            "router.tenants.acme.weigth: is not a known key; did you mean 'weight'?",
        ),
        ([], "[cluster]\nqqq = 1\n", "cluster.qqq: is not a known key\n"),
        ([], "max_queued = -1\n", "max_queued: "),
        ([], "max_queued = \n", "Invalid value"),
        (
            [],
            "[[pools]]\nrole = 'both'\nmetrics_listen = '127.0.0.1:7990'\n",
            "pools[0].metrics_listen: 127.0.0.1:7990 is the first of 64 ports",
        ),
        ([], "[cluster]\n[[pools]]\nrole = 'prefill'\n", "pools: prefill workers need workers of role decode"),
    ],
)
def test_check_refuses_a_file_with_the_path_of_the_key(argv, content, cause, tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(content)

    out, err = printed(capsys, *argv, "--check", str(file), status=3)

    assert out == ""
    assert err.startswith(f"fleet: {file}: ")
    assert cause in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "section", "field"),
    [
        (["up"], "[[pools]]\nrole = 'both'\n", "pools[0]: metrics_listen"),
        (["up"], "[store]\n", "store: metrics_listen"),
        (["up"], "[planner]\ngoals = {ttft_seconds = 1, tpot_seconds = 0.1}\n", "planner: metrics_listen"),
        (["up"], "[router]\n", "router: http_listen"),
        (["up"], "[router]\n", "router: grpc_listen"),
        (["up"], "[router]\n", "router: health_listen"),
        (["up"], "[router]\n", "router: kserve_listen"),
        (["up"], "[router]\n", "router: control_listen"),
        (["router"], "", "http_listen"),
        (["router"], "", "replicas_listen"),
        (["kvstore"], "store_id = 's'\nlisten = ['unix:/s']\n", "metrics_listen"),
        (["worker"], "worker_id = 'w'\nmodel = 'm'\nmodel_dir = '/m'\n", "metrics_listen"),
        (["worker"], "worker_id = 'w'\nmodel = 'm'\nmodel_dir = '/m'\n", "listen"),
        (["worker"], "worker_id = 'w'\nmodel = 'm'\nmodel_dir = '/m'\n", "listen = ''"),
    ],
)
def test_check_and_process_refuse_an_address_without_a_host(argv, section, field, tmp_path, capsys):
    file = tmp_path / "settings.toml"
    field, _, empty = field.partition(" = ")
    address = empty or "':9450'"
    file.write_text(f"{section}{field.rpartition(' ')[2]} = {address}\n")
    process = ["up"] if argv == ["up"] else ["serve", *argv]

    told = printed(capsys, *argv, "--check", str(file), status=3).err

    assert told.startswith(f"fleet: {file}: {field}: {address} is n")
    advice = "" if empty else "; 0.0.0.0:9450 listens at all addresses"
    assert told.endswith(f"host:port with a port up to 65535{advice}\n")
    assert run([*process, "--config", str(file)]) == 3
    assert capsys.readouterr().err == told


PLANNER = """
model = "m"
goals = { ttft_seconds = 1.0, tpot_seconds = 0.05 }
rule = { kind = "load", requests_per_replica = 4 }
source = { kind = "routers", addresses = ["unix:/x"] }
target = { kind = "folder", folder = "x" }
pools = [{ name = "both", role = "both", gpu = "mi300x" }]
"""
HOSTED = """
url = "https://b"
dollars_per_hour = 1
dollars_per_million_prompt_tokens = 1
dollars_per_million_answer_tokens = 1
"""
UP = """
[[pools]]
role = "both"
[planner]
goals = { ttft_seconds = 1.0, tpot_seconds = 0.05 }
"""


@pytest.mark.parametrize(
    ("part", "content", "cause"),
    [
        ("planner", PLANNER + "prices = 'none.toml'\n", "prices: none.toml: No such file or directory"),
        ("planner", PLANNER + "region = 'east'\n", "region: 'east' needs `prices`"),
        (
            "planner",
            PLANNER.replace(', gpu = "mi300x"', "") + "budget = { gpus = 4 }\n",
            "budget.gpus: would limit nothing",
        ),
        ("planner", PLANNER + "prices = 'FOLDER/book.toml'\nregion = 'east'\n", "region: 'east' is not a region of "),
        ("planner", PLANNER + "prices = 'FOLDER/book.toml'\n", "regions.west.mi300x: the price book has no price"),
        ("up", UP + "prices = 'none.toml'\n", "planner.prices: none.toml: No such file or directory"),
        ("up", UP + "[planner.pools.decode]\n", "planner.pools.decode: is not a pool of this cluster; there are both"),
        ("up", UP + "[planner.engines.both]\nkind = 'gpu'\nmodel = 'm'\n", "planner.pools.both.gpu: is needed"),
        (
            "up",
            UP + "pools = { both = { gpu = 'h100' } }\nengines = { both = { kind = 'gpu', model = 'FOLDER/none' } }\n",
            "planner.engines.both: ",
        ),
        (
            "up",
            "[cluster]\nserved_name = 'a'\n[[pools]]\nrole = 'both'\n[router.overflow.b]\n" + HOSTED,
            "router.overflow.b: this cluster serves no such model, only a",
        ),
        (
            "router",
            "[models]\na = '/a'\n[overflow.b]\n" + HOSTED,
            "overflow.b: `models` has no such model; there are: a",
        ),
    ],
)
def test_check_refuses_what_fails_at_the_start(part, content, cause, tmp_path, capsys):
    (tmp_path / "book.toml").write_text("[regions.west]\nh100 = 2\n")
    file = tmp_path / "settings.toml"
    file.write_text(content.replace("FOLDER", str(tmp_path)))

    err = printed(capsys, part, "--check", str(file), status=3).err

    assert err.startswith(f"fleet: {file}: ")
    assert cause in err


@pytest.mark.parametrize(("part", "content"), [("planner", PLANNER), ("up", UP)])
def test_check_accepts_planners_that_start(part, content, tmp_path, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(content)

    assert "a valid settings file" in printed(capsys, part, "--check", str(file)).out


@pytest.mark.parametrize("part", [[], ["up"]])
def test_check_reads_a_pipe_once(part, capsys):
    goals = {"ttft_seconds": 1, "tpot_seconds": 0.05}
    with a_pipe(json.dumps({"pools": [{"role": "both"}], "planner": {"goals": goals}})) as file:
        assert "a valid settings file of fleet up" in printed(capsys, *part, "--check", str(file)).out


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("current", "Qwen3-0.6B"),  # a link
        ("Qwen3-0.6B/.", "Qwen3-0.6B"),
        (".", "FOLDER"),
        ("Qwen/Qwen3-0.6B@v1", "Qwen/Qwen3-0.6B"),
        ("models/llama", "llama"),  # exists, and is no repository
        ("tiny", "tiny"),
    ],
)
@pytest.mark.parametrize("other", ["current", "Qwen3-0.6B@v1", "llama/"])
def test_check_names_the_model_as_the_start_does(model, served, other, tmp_path, capsys):
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "current").symlink_to("Qwen3-0.6B")
    (tmp_path / "models" / "llama").mkdir(parents=True)
    file, name = tmp_path / "up.toml", served.replace("FOLDER", tmp_path.name)
    topology = f"[cluster]\nmodel = '{model}'\n[[pools]]\nrole = 'both'\n[router.overflow.'NAME']\n{HOSTED}"

    file.write_text(topology.replace("NAME", name))
    printed(capsys, "up", "--check", str(file))

    file.write_text(topology.replace("NAME", other))
    err = printed(capsys, "up", "--check", str(file), status=3).err
    assert err == f"fleet: {file}: router.overflow.{other}: this cluster serves no such model, only {name}\n"


@pytest.mark.parametrize("model", ["~nobody-here/m", "a\\u0000"])
def test_model_without_a_path_is_refused(model, tmp_path, capsys):
    file = tmp_path / "up.toml"
    file.write_text(f'[cluster]\nmodel = "{model}"\n[[pools]]\nrole = "both"\n')

    err = printed(capsys, "up", "--check", str(file), status=3).err
    assert err.startswith(f"fleet: {file}: cluster.model: ")


def test_check_refuses_a_file_that_is_no_object(tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text("[1]")

    assert printed(capsys, "--check", str(file), status=3).err == f"fleet: {file}: is not an object with keys\n"
    assert "No such file" in printed(capsys, "--check", str(tmp_path / "none.toml"), status=3).err


@pytest.mark.parametrize(("name", "kind"), [("a.toml", "TOML"), ("a.json", "JSON")])
def test_binary_file_is_refused_in_words(name, kind, tmp_path, capsys):
    file = tmp_path / name
    file.write_bytes(b'"\xff\xfe\x00"')

    err = printed(capsys, "--check", str(file), status=3).err
    assert err == f"fleet: {file}: is not a text in UTF-8, and so no {kind} file\n"


def test_refusal_as_json_is_on_standard_output(tmp_path, capsys):
    file = tmp_path / "bad.toml"
    file.write_text("[cluster]\nmodle = 'x'\n")

    out, err = printed(capsys, "--json", "--check", str(file), status=3)

    cause = f"{file}: cluster.modle: is not a known key; did you mean 'model'?"
    assert json.loads(out) == {"file": str(file), "part": "up", "valid": False, "error": cause}
    assert err == ""
    missing = printed(capsys, "--json", "--check", str(tmp_path / "none.toml"), status=3).out
    assert json.loads(missing)["valid"] is False


def test_check_as_json_names_file_and_part(tmp_path, capsys):
    file = tmp_path / "store.toml"
    file.write_text("store_id = 's'\nlisten = ['unix:/x']\ncapacity_bytes = 1048576\n")

    assert json.loads(printed(capsys, "--json", "--check", str(file)).out) == {
        "file": str(file),
        "part": "kvstore",
        "valid": True,
    }
