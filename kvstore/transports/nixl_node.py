"""NIXL node: starts the process with a node's NIXL agent, and replaces it when it dies.

The agent runs in a separate process. When a peer disappears, UCX may end the process in which UCX itself runs, and this
must not end the node.
"""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from kvstore.errors import StoreNotStarted
from kvstore.security.open_ports import NO_CREDENTIALS, UCX_PORTS, OpenPort, warn_of_open_ports
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports.nixl import NixlOffer

STARTING_SECONDS = 60.0  # time limit for a start; UCX examines all devices, which takes seconds on a busy host
ENDING_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_OFFER_BYTES = 1 << 20

FABRICS = Path("/sys/class/infiniband")

NIXL_PORTS = OpenPort(
    "nixl",
    UCX_PORTS,
    NO_CREDENTIALS,
    'let only trusted hosts reach these ports, or set nixl = "never"',
)

log = logging.getLogger(__name__)


def has_fabric() -> bool:
    """Return whether this host has an RDMA device, on which NIXL is faster than TCP."""
    return FABRICS.is_dir() and any(FABRICS.iterdir())


class NixlNode:
    """Runs the process of a node's NIXL agent; `run` replaces the process when it has died."""

    def __init__(self, tier: SharedMemoryTier):
        self._tier = tier
        self.process: asyncio.subprocess.Process | None = None
        self._offer: NixlOffer | None = None
        self._has_warned = False

    @property
    def offer(self) -> NixlOffer | None:
        """The offer that a client gets in the handshake, to use the pool by NIXL; None while no agent runs."""
        return self._offer

    @property
    def pid(self) -> int | None:
        """The id of the agent process; None while no such process runs."""
        return None if self.process is None else self.process.pid

    async def start(self) -> None:
        """Start the process, and wait until clients can connect.

        The first successful start also logs a warning that other hosts can reach the ports of NIXL.

        Raises:
            StoreNotStarted: The process ended or did not answer in time, so NIXL cannot be used here.
        """
        pool = self._tier.fileno()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvstore.transports.nixl_process",
            str(pool),
            str(self._tier.capacity_bytes),
            stdin=asyncio.subprocess.PIPE,  # the process ends when this pipe closes, even if the node is killed
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(pool,),
        )
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(STARTING_SECONDS):
                said = await self.process.stdout.read(MAX_OFFER_BYTES)
            self._offer = msgspec.msgpack.decode(said, type=NixlOffer)
        except (TimeoutError, msgspec.DecodeError) as error:
            await self.stop()
            raise StoreNotStarted(
                "nixl: the agent process did not start; `fleet doctor` says whether NIXL works"
            ) from error
        except BaseException:
            await self.stop()
            raise
        if not self._has_warned:
            self._has_warned = True
            warn_of_open_ports([NIXL_PORTS])

    async def run(self) -> None:
        """Replace the process whenever it dies, until cancelled.

        The pause before a restart doubles each time, up to `LONGEST_PAUSE_SECONDS`. If the last process lived for at
        least `LONGEST_PAUSE_SECONDS`, the pause is `FIRST_PAUSE_SECONDS` again.
        """
        now = asyncio.get_running_loop().time
        pause = FIRST_PAUSE_SECONDS
        while True:
            if self.process is not None:
                began = now()
                code = await self.process.wait()
                self.process, self._offer = None, None
                if now() - began >= LONGEST_PAUSE_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                log.warning("nixl process died", extra={"exit_code": code})
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                await self.start()
            except StoreNotStarted as error:
                log.warning("nixl process not started", extra={"reason": str(error)})
            else:
                log.info("nixl process restarted")

    async def stop(self) -> None:
        """End the agent process, if it runs."""
        process, self.process, self._offer = self.process, None, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
