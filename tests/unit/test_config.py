"""Settings files: what loading and saving them guarantees."""

from pathlib import Path

import pytest
from msgspec import Struct

from fleet.config import load, read_file_changes, save
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath, Role
from fleet.local.settings import ClusterSection, PoolSection, Topology, model_folder, served_name
from fleet.router.settings.router import RouterSettings
from kvstore.service.settings import StoreSettings
from workers.settings import WorkerSettings

HUGE = 10**400  # TOML's parser of Python reads such integers, too


def a_file(folder, text, name="topology.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_an_empty_file_is_the_default_topology(tmp_path):
    topology = load(a_file(tmp_path, ""), Topology)

    assert topology == Topology()
    assert [(pool.role, pool.replicas) for pool in topology.pools] == [(Role.PREFILL, 1), (Role.DECODE, 1)]


def test_a_topology_says_what_differs_from_the_default(tmp_path):
    topology = load(
        a_file(
            tmp_path,
            """
            [cluster]
            engine = "simulated"
            kv_paths = ["direct", "store"]
            [router]
            max_queued = 7
            [[pools]]
            role = "both"
            replicas = 3
            """,
        ),
        Topology,
    )

    assert topology.cluster.engine == "simulated"
    assert topology.cluster.kv_paths == (KvPath.DIRECT, KvPath.STORE)
    assert topology.router.max_queued == 7
    assert topology.pools == (PoolSection(role=Role.BOTH, replicas=3),)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[cluster]\nengin = 'vllm'", "cluster.engin: is not a known key; did you mean 'engine'?"),
        ("clusters = 1", "clusters: is not a known key; did you mean 'cluster'?"),
        (
            "[[pools]]\nrole = 'decode'\nsimulated = {speedup = 2, sed = 1}",
            "pools[0].simulated.sed: is not a known key; did you mean 'seed'?",
        ),
        ("[[pools]]\nrole = 'decoder'", "pools[0].role: Invalid enum value 'decoder'; use prefill, decode or both"),
        ("[[pools]]\nreplicas = 1", "pools[0]: Object missing required field `role`; use prefill, decode or both"),
        ("[store]\ncapacity_mib = 0", "store.capacity_mib: Expected `int` >= 1"),
        ("[router]\nmax_queued = 'many'", "router.max_queued: Expected `int`, got `str`"),
        (f"[router]\nmax_queued = {HUGE}", "router.max_queued: Expected `int` <= 4294967295"),
        (
            f"[router]\nremote_prefill_min_tokens = {HUGE}",
            "router.remote_prefill_min_tokens: Expected `int` <= 4294967295",
        ),
        (f"[router]\nmax_sessions = {HUGE}", "router.max_sessions: must be an integer of at most 64 bits"),
        (f"[router]\nmax_queue_seconds = {HUGE}", "router.max_queue_seconds: Number out of range"),
        (f"[[router.nope]]\na = {HUGE}", "router.nope: is not a known key"),
        (
            "[router]\ntenants_redis = 'http://:secret@host:6379'",
            "router: tenants_redis: must be redis://host[:port][/db], rediss://… or unix:///path",
        ),
        (
            "[router]\ntenants_redis = 'host:6379'",
            "router: tenants_redis: must be redis://host[:port][/db], rediss://… or unix:///path",
        ),
        (
            "[router]\ntenants_redis = 'redis://:secret@host:port'",
            "router: tenants_redis: its port is no number from 1 to 65535, or its brackets do not match; write the characters / ? # @ [ ] of a password as %2F, %3F and so on",
        ),
        (
            "[router]\nopenai_workers = [{worker_id = 'a', model = 'm', url = 'http://:password@host'}]",
            "router.openai_workers[0]: url: must hold no user name and no password; use api_key",
        ),
        (
            "[router]\nopenai_workers = [{worker_id = 'a', model = 'm', url = 'http://me:password@host:port'}]",
            "router.openai_workers[0]: url: must hold no user name and no password; use api_key",
        ),
        ("[router.http]\nidle_timeout_seconds = 0", "router.http.idle_timeout_seconds: Expected `float` > 0.0"),
        (
            "[router.http]\nmax_conections = 9",
            "router.http.max_conections: is not a known key; did you mean 'max_connections'?",
        ),
        ("[tls]\nkey = 'k'", "tls: is not a known key; did you mean 'cluster.tls' or 'router.tls'?"),
        ("[router.tls]\nkey = 'k'", "router.tls.key: certificate and key go together"),
        (
            "[router.metrics_access]\nkey_sha256 = ['my-key']",
            "router.metrics_access.key_sha256[0]: must have 64 of the digits 0-9 and a-f, as sha256sum prints",
        ),
        ("[cluster\nmodel = 1", "Expected ']' at the end of a table declaration (at line 1, column 9)"),
        ("[[pools]]\nrole = 'prefill'", "pools: prefill workers need workers of role decode or both to hand over to"),
        ("pools = []", "pools: no worker is left to start"),
        (
            "[cluster]\nengine = 'simulated'\ntool_call_parser = 'hermess'",
            "cluster.tool_call_parser: 'hermess' is none of the parsers that the router has: hermes, qwen3_coder, qwen3_json, qwen3_xml; did you mean 'hermes'?",
        ),
        (
            "[cluster]\nengine = 'simulated'\nreasoning_parser = 'qwen33'",
            "cluster.reasoning_parser: 'qwen33' is none of the parsers that the router has: deepseek_r1, deepseek_v3, qwen3; did you mean 'qwen3'?",
        ),
        (
            "[cluster]\nkv_paths = []",
            "cluster.kv_paths: prefill workers need a way to hand over blocks: store or direct",
        ),
        ("[router]\nstore = 'unix:/x'", "router: `models` and `store` follow from the other sections; leave them out"),
        (
            "[store]\nplace = 'worker'",
            "store.place: a store in the worker's process is for one worker, and `pools` has 2; use 'process'",
        ),
        (
            "[cluster]\nkv_paths = ['direct']\n[store]\nplace = 'worker'\n[[pools]]\nrole = 'both'",
            "store.place: `cluster.kv_paths` has no 'store', so that there would be none",
        ),
    ],
)
def test_error_names_file_path_and_cause_in_one_line(tmp_path, text, cause):
    path = a_file(tmp_path, text)

    with pytest.raises(ConfigurationRefused) as refused:
        load(path, Topology)

    assert str(refused.value) == f"{path}: {cause}"


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", "mistral"), *(("simulated", n) for n in ("", "auto", "hermes", "mistral", "llama3_json"))],
)
def test_known_parsers_are_accepted(tmp_path, engine, name):
    text = f"[cluster]\nengine = '{engine}'\ntool_call_parser = '{name}'"

    assert load(a_file(tmp_path, text), Topology).cluster.tool_call_parser == name


def test_unknown_key_is_refused_with_the_path_of_its_table(tmp_path):
    path = a_file(tmp_path, "store_id = 's'\nlisten = ['unix:/x']\n[tenant_quotas]\nme = 1")

    with pytest.raises(ConfigurationRefused) as refused:
        load(path, StoreSettings)

    assert (
        str(refused.value)
        == f"{path}: tenant_quotas: its keys: must have 64 of the digits 0-9 and a-f, as sha256sum prints"
    )


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_bytes(b"[cluster]\nmodel = '\xff'")

    with pytest.raises(ConfigurationRefused, match="is not a text in UTF-8"):
        load(path, Topology)


def test_device_without_an_end_is_no_settings_file():
    with pytest.raises(ConfigurationRefused, match="/dev/zero: has more than 64 MiB"):
        load(Path("/dev/zero"), Topology)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationRefused, match=r"nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml", Topology)


@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(models={"tiny": "/models/tiny"}, store="unix:/run/store"),
        StoreSettings(store_id="s", listen=("unix:/run/store",)),
        WorkerSettings(worker_id="w", model="tiny", kv_paths=(KvPath.DIRECT,), role=Role.PREFILL),
        WorkerSettings(worker_id="w", model="tiny", embedded_store=StoreSettings(store_id="s", listen=("unix:/s",))),
    ],
)
def test_settings_of_a_process_survive_their_file(tmp_path, settings):
    path = tmp_path / "settings.json"
    save(settings, path)

    assert load(path, type(settings)) == settings
    assert path.stat().st_mode & 0o077 == 0  # the file may contain secrets


@pytest.mark.parametrize("kind", [Topology, RouterSettings, StoreSettings, WorkerSettings])
def test_every_section_refuses_unknown_keys(kind):
    seen = set()

    def visit(each):
        if isinstance(each, type) and issubclass(each, Struct) and each not in seen:
            seen.add(each)
            assert each.__struct_config__.forbid_unknown_fields, each
            for field in each.__annotations__.values():
                visit(field)
        for argument in getattr(each, "__args__", ()):
            visit(argument)

    visit(kind)
    assert seen


def test_a_model_folder_must_be_one(tmp_path):
    with pytest.raises(ConfigurationRefused, match=r"cluster.model: .*/nowhere is not a folder"):
        model_folder(ClusterSection(model="nowhere"), tmp_path, tmp_path)
    with pytest.raises(ConfigurationRefused, match=r"is not a Hugging Face model folder: it has no config.json"):
        model_folder(ClusterSection(model="."), tmp_path, tmp_path)


def test_model_path_is_relative_to_file_and_named_after_folder(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    section = ClusterSection(model="llama")

    found = model_folder(section, tmp_path / "tiny", tmp_path)

    assert found == folder
    assert served_name(section, found) == "llama"


def test_value_without_json_form_is_refused_by_its_path(tmp_path):
    settings = RouterSettings(policies={"dynamo": {"weights": [1.0, float("inf")]}})

    with pytest.raises(ConfigurationRefused, match=r"^policies\.dynamo\.weights\.1: must be finite$"):
        save(settings, tmp_path / "router.json")


def test_setting_can_come_from_a_file_as_text_or_json(tmp_path):
    secret = a_file(tmp_path, "12345\n", "secret")
    tenants = a_file(tmp_path, '{"alice": {"weight": 2}}', "tenants.json")
    settings = a_file(tmp_path, "")

    changes = read_file_changes([f"tenant_secret={secret}", f"tenants={tenants}"])

    loaded = load(settings, RouterSettings, changes)
    assert loaded.tenant_secret == "12345"  # a text, though it looks like a number
    assert loaded.tenants["alice"].weight == 2


@pytest.mark.parametrize(
    ("assignment", "cause"),
    [
        ("tenant_secret", "'tenant_secret' is not PATH=FILE"),
        ("=/run/secret", "'=/run/secret' is not PATH=FILE"),
        ("tenant_secret=nowhere", "nowhere: No such file or directory"),
        ("tenants=broken.json", "broken.json: is not JSON"),
        ("tenant_secret=bytes", "bytes: is not UTF-8"),
        ("tenant_secret=/dev/zero", "/dev/zero: has more than 64 MiB"),
    ],
)
def test_unreadable_setting_file_is_refused_without_its_content(tmp_path, monkeypatch, assignment, cause):
    monkeypatch.chdir(tmp_path)
    a_file(tmp_path, "hush{", "broken.json")
    (tmp_path / "bytes").write_bytes(b"hush\xff")

    with pytest.raises(ConfigurationRefused, match=cause) as refused:
        read_file_changes([assignment])

    assert "hush" not in str(refused.value)


def test_changes_leave_content_that_was_read_unchanged(tmp_path):
    content = {"router": {"max_queued": 1}}

    changed = load(tmp_path / "read.toml", Topology, {"router.max_queued": 2}, content=content)

    assert changed.router.max_queued == 2
    assert content == {"router": {"max_queued": 1}}
