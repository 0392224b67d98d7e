"""Election by a lock file: one candidate leads, also after the folder of the file was made anew."""

import asyncio
import shutil
from contextlib import ExitStack

import pytest

from fleet.planner.election.file import open_file_election
from tests.support.waiting import until

pytestmark = pytest.mark.integration


async def test_one_candidate_leads_after_the_folder_is_made_anew(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with ExitStack() as held:
        first, second = (
            held.enter_context(open_file_election(folder / "lock", name, may_come_later=True)) for name in "ab"
        )
        running = [asyncio.create_task(first.run())]
        await until(first.leads)
        running.append(asyncio.create_task(second.run()))

        shutil.rmtree(folder)
        await until(lambda: not first.leads())
        running[0].cancel()
        folder.mkdir()
        await until(second.leads)
        running.append(asyncio.create_task(first.run()))
        await until(lambda: (folder / "lock").read_text() == "b\n")
        running[1].cancel()
        second.close()
        await until(first.leads)

        assert (first.leads(), second.leads()) == (True, False)
        for task in running:
            task.cancel()
