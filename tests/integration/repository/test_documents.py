"""Tests that run every block of the README and the documents, or see that its page says why not.

tests/support/documents.py has the rules. The tests of Kubernetes run what needs a Kubernetes API (tests/kube/chart/test_documents.py).
"""

import importlib.util
import json
import re
import tomllib

import msgspec
import pytest

from fleet.config import load
from fleet.local.settings import Topology
from fleet.local.tiny_model import build_tiny_model
from fleet.planner.connectors.virtual import Intent, PlanReport
from fleet.planner.settings import PlanConnectorSettings, PlannerSettings
from fleet.planner.sizing.prices import PriceBook
from fleet.router.settings.router import RouterSettings
from fleet.sim.scenario import Scenario
from kvstore.service.settings import StoreSettings
from tests.support.documents import PAGES, ROOT, all_blocks, blocks, complaint, missing_paths
from tests.support.shell_session import ShellSession
from workers.settings import WorkerSettings

pytestmark = pytest.mark.integration

BLOCKS = all_blocks()
LLAMA = ROOT / "loadtests" / "studies" / "models" / "llama-3.1-70b.json"
WORKER = {"worker_id": "w", "model": "m", "model_dir": "/models/m", "listen": "unix:/w.sock"}
SETTINGS = {
    "router": (RouterSettings, {}),
    "topology": (Topology, {}),
    "worker": (WorkerSettings, WORKER),
    "store": (StoreSettings, {}),
    "connector": (PlanConnectorSettings, {}),
    "scenario": (Scenario, tomllib.loads((ROOT / "loadtests" / "studies" / "conversation.toml").read_text())),
    "plan": (Intent, {}),
    "report": (PlanReport, {}),
    "planner": (PlannerSettings, {}),
    "prices": (PriceBook, {}),
}
"""Settings type of an example, and the required keys that the example may leave out."""

REPLACED = {
    r"\bmake up\b": "make up ENGINE=simulated DEV=README.md --old-file=README.md HTTP_PORT=$HTTP GRPC_PORT=$GRPC",
    r"/tmp/by-hand": "FOLDER/by-hand",
    r"/etc/fleet": "FOLDER/etc",
    r"/models/llama": "FOLDER/llama",
    r"/tmp/flight": "FOLDER/flight",
    r'engine = "vllm"': 'engine = "simulated"',
    r"pip install (\./\S+)": (
        r"pip install --quiet --no-deps --no-build-isolation --target packages \1; export PYTHONPATH=$PWD/packages"
    ),
}
"""Values that differ between a test and a page: folders, engines, and where packages go."""

SHORTER = {
    r"(fleet sim (?:run|sweep|compare|capacity) .*--(?:report|seeds|over|points) .*)": r"\1 --set workload.requests=300"
}
"""Shorter runs for the page that shows every command of the simulator. The README shows results, so its runs are whole."""


def runs_here(block):
    return block.language in {"", "sh", "python", "toml", "json"} and not block.clauses.keys() & {"skip", "kube"}


def is_step(block):
    return runs_here(block) and ("file" in block.clauses or block.language in {"", "sh", "python"})


def test_every_block_is_run_or_skipped_for_a_listed_reason():
    assert [f"{block}: {why}" for block in BLOCKS if (why := complaint(block))] == []
    assert len(BLOCKS) > 100


def test_most_blocks_run():
    skipped = [block for block in BLOCKS if "skip" in block.clauses]

    assert len(skipped) < len(BLOCKS) / 3


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/README.md"])
def test_paths_that_page_names_exist(page):
    assert missing_paths(ROOT / page) == []


def test_readme_lists_every_extra_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    _, _, table = (ROOT / "README.md").read_text().partition("| extra | needed for |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()

    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])) == sorted(
        extras - {"dev", "kube-tests"}
    )


@pytest.mark.parametrize("block", [each for each in BLOCKS if "settings" in each.clauses], ids=str)
def test_settings_example_is_loaded(block, tmp_path):
    kind, required = SETTINGS[block.clauses["settings"]]
    read = json.loads(block.text) if block.language == "json" else tomllib.loads(block.text)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(required | read))

    got = load(file, kind)

    assert contains(msgspec.to_builtins(got), read), "each key of the example is a setting"


def contains(whole, part):
    """Return whether a loaded example still has everything that the example says."""
    match part:
        case dict():
            return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
        case list():
            return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.timeout(900)  # the README's commands take a minute on two idle cores
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(is_step, blocks(page)))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_page_run_in_their_order(page):
    with ShellSession(REPLACED | SHORTER if page.name == "simulator.md" else REPLACED) as session:
        build_tiny_model(session.folder / "built", tokenizer_only=True).rename(session.folder / "llama")
        (session.folder / "llama" / "config.json").write_bytes(LLAMA.read_bytes())
        for block in blocks(page):
            if runs_here(block) and is_step(block):
                if (package := block.clauses.get("needs")) and not importlib.util.find_spec(package):
                    continue
                session.run(block)
                assert block.language != "python" or "file" in block.clauses or session.output.strip(), (
                    f"{block}: no output"
                )
            elif "output" in block.clauses:
                missing = [line for line in block.text.splitlines() if not shown_in(line, session.output)]
                assert not missing, f"{block}: not in the output:\n{session.output}"


def shown_in(line, output):
    """Return whether a line is in an output; … stands for any text, and figures of CPU time may differ."""
    pattern = re.escape(line).replace("…", ".*")
    pattern = re.sub(r"\\\([\d.\\]+\\ s\\ of\\ CPU,\\ [\d,]+", r"\\([\\d.]+\\ s\\ of\\ CPU,\\ [\\d,]+", pattern)
    return re.search(pattern, output)
