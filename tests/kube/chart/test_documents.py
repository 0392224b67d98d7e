"""Documented commands for Kubernetes: runs the kubectl, Helm and `fleet` commands of the documents on the API server.

An operator and simulated nodes run beside it. tests/support/documents.py has the rules for the blocks of a page, and
tests/integration/repository/test_documents.py runs all other commands.
"""

import asyncio
import contextlib
import shutil

import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from fleet.net.kubernetes.kinds import GROUP, VERSION
from tests.support.documents import PAGES, ROOT, blocks
from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import AskedRouters, an_operator
from tests.support.kube.tools import helm_3, kubectl, tools_folder
from tests.support.shell_session import ShellSession
from tests.support.waiting import until

NAMESPACE = "serving"
INSTALL = ROOT / "docs" / "kubernetes" / "install.md"


def commands(page):
    return [block for block in blocks(page) if "kube" in block.clauses]


@pytest.fixture
def shown(tmp_path):
    """Run an API server of this test's own, because the pages install into a namespace with a fixed name."""
    with an_api_server(with_controllers=True, beside=Nodes().run) as server, Api(server.url) as api:
        yield AskedRouters(server, api, NAMESPACE, tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
async def test_cluster_commands_of_page_run_in_their_order(page, shown, tmp_path):
    programs = {"kubectl": kubectl(tools_folder()), "helm": helm_3(tools_folder())}
    installed = [] if any("helm install" in block.text for block in commands(page)) else commands(INSTALL)[:1]
    (tmp_path / ".kube").mkdir()
    shutil.copy(shown.kubeconfig, tmp_path / ".kube" / "config")
    with ShellSession({}, programs, HOME=str(tmp_path)) as session:
        async with contextlib.AsyncExitStack() as running:
            for block in [*installed, *commands(page)]:
                await asyncio.to_thread(session.run, block)
                if "helm install" in block.text:
                    await running.enter_async_context(an_operator(shown))
                if block in installed:  # readers of other pages have installed Fleet earlier
                    await until(lambda: shown.ready("llama-70b"))

    assert shown.api.get(f"/apis/{GROUP}/{VERSION}").code == (404 if page == INSTALL else 200), (
        "the last block removes everything"
    )
