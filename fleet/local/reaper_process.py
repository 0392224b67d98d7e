"""Reaper process: starts the orphan reaper of a supervisor, and reports process groups to it (`fleet.local.orphan_reaper`).

If a reaper has ended or was stopped, it could not clean up after the supervisor, so it is replaced. The new reaper gets
the list of all running process groups.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Never

from fleet.core.clock import Clock
from fleet.local.heartbeat import sample_process
from fleet.local.liveness import Liveness, LivenessLimits
from fleet.local.orphan_reaper import BEAT_SECONDS
from fleet.local.runs import note_group

# The reaper is killed if it has not ended this number of seconds after the end of its input. Usually it ends at once, because
# no child is left. This is also the pause between two attempts to start a reaper.
END_SECONDS = 10.0


class ReaperProcess:
    """Runs the orphan reaper of one local run.

    Call `start` first, run `keep` while the children run, and call `end` after they have ended.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], clock: Clock, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._environment = environment
        self._clock = clock
        self._say = say
        self._groups: dict[int, None] = {}
        self._process: Process | None = None

    async def start(self) -> None:
        """Start a reaper.

        The ids of all running process groups are arguments of its command line. If they were written to its standard
        input later, the supervisor might be killed before it has written them.

        Raises:
            OSError: The reaper cannot be started.
        """
        known = list(self._groups)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleet.local.orphan_reaper", str(self._folder), *map(str, known)),
            stdin=PIPE,
            stdout=DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        for group in self._groups.keys() - set(known):
            self._write(f"+{group}\n")
        for group in set(known) - self._groups.keys():
            self._write(f"-{group}\n")

    def tell(self, change: str, group: int) -> None:
        """Report to the reaper that a process group has started (``+``) or ended (``-``).

        Record it in the runtime folder too (`fleet.local.runs`, rule 2).
        """
        if change == "+":
            self._groups[group] = None
        else:
            self._groups.pop(group, None)
        self._write(f"{change}{group}\n")
        note_group(self._folder, change, group)

    async def keep(self) -> Never:
        """Send heartbeats, and replace a reaper that has ended or was stopped, until cancelled."""
        while True:
            assert self._process is not None
            liveness = Liveness(LivenessLimits(), self._clock.now())
            while self._process.returncode is None:
                self._write(".\n")
                await asyncio.sleep(BEAT_SECONDS)
                look = sample_process(self._process.pid)
                if look is not None and liveness.observe(look, heartbeat=False, now=self._clock.now()) is not None:
                    self._process.kill()
                    await self._process.wait()
            self._say("the orphan reaper was ended or stopped by another process; starting it again")
            try:
                await self.start()
            except OSError as error:
                self._say(f"the orphan reaper cannot be started: {error}")
                await asyncio.sleep(END_SECONDS)

    async def end(self) -> None:
        """Wait until the reaper has ended.

        Kill the reaper if it does not end in time, for example because a signal has stopped it.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None and not self._process.stdin.is_closing():
            with suppress(ConnectionError):
                self._process.stdin.write(line.encode())
