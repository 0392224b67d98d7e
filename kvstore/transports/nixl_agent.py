"""NIXL agent: a thin wrapper of a NIXL agent with the UCX backend. Needs the package ``nixl``.

NIXL raises a dozen exceptions without a common base, returns states as strings, and has no deadlines. UCX prints to
standard output, and may end the process when a peer disappears. A node therefore runs its agent in a separate process.
"""

import contextlib
import importlib
import inspect
import itertools
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

BACKEND = "UCX"


class NixlAgentFailed(Exception):
    """The agent, its peer or their connection failed; the agent has to be closed."""


class NixlMemoryKind(StrEnum):
    """The kind of memory that is registered with an agent."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class TransferDirection(StrEnum):
    """The direction of a transfer, seen from the agent that starts it."""

    READ = "READ"
    WRITE = "WRITE"


Spans: TypeAlias = NDArray[np.uint64]
"""Memory ranges of a process, one in each row: address, length in bytes, device (0 for DRAM)."""


def spans(rows: Sequence[tuple[int, int]], device: int = 0) -> Spans:
    """Return a `Spans` table with one row for each pair of an address and a length in bytes."""
    table = np.full((len(rows), 3), device, dtype=np.uint64)
    table[:, :2] = rows
    return table


def joined(table: Spans) -> Spans:
    """Return the memory ranges of `table`, all of one device, with those merged that touch or overlap."""
    table = table[np.argsort(table[:, 0])]
    begins, ends = table[:, 0], np.maximum.accumulate(table[:, 0] + table[:, 1])
    first = np.flatnonzero(np.concatenate(([True], begins[1:] > ends[:-1])))
    last = np.concatenate((first[1:], [len(table)])) - 1
    found = table[first].copy()
    found[:, 1] = ends[last] - begins[first]
    return found


class NixlAgent:
    """Moves bytes between the memory of this process and that of peers. Only one thread at a time may use it.

    All methods raise `NixlAgentFailed` if the agent, a peer or their connection fails.
    """

    def __init__(self, name: str):
        """Open the agent. This takes half a second, because UCX examines all devices of the machine."""
        try:
            api = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise NixlAgentFailed(f"nixl cannot be imported: {error}; `fleet doctor` says more") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._failures = tuple(
            kind for _, kind in inspect.getmembers(bindings, inspect.isclass) if issubclass(kind, Exception)
        )
        with self._translated():
            # NIXL's progress thread is off, because it would occupy a core.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            self._agent = api.nixl_agent(name, config)
        if BACKEND not in self._agent.backends:
            raise NixlAgentFailed("nixl has no UCX plugin here; `fleet doctor` says more")
        self._transfers: dict[int, Any] = {}
        self._registered: dict[int, Any] = {}
        self._numbers = itertools.count()

    @property
    def metadata(self) -> bytes:
        """The data that a peer needs to reach this agent and its registered memory."""
        with self._translated():
            return bytes(self._agent.get_agent_metadata())

    def register(self, table: Spans, memory: NixlMemoryKind = NixlMemoryKind.DRAM) -> int:
        """Register memory for transfers; return the number to pass to `deregister`."""
        number = next(self._numbers)
        with self._translated():
            regions = [(*row, "") for row in table.tolist()]
            self._registered[number] = self._agent.register_memory(regions, memory)
        return number

    def deregister(self, registered: int) -> None:
        with self._translated():
            self._agent.deregister_memory(self._registered.pop(registered))

    def add_peer(self, metadata: bytes) -> str:
        """Add another agent as a peer; return its name."""
        with self._translated():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def start(
        self,
        direction: TransferDirection,
        local: Spans,
        remote: Spans,
        peer: str,
        memory: NixlMemoryKind = NixlMemoryKind.DRAM,
    ) -> int:
        """Begin a transfer between pairs of spans of equal length, and return its number.

        The peer's spans are in its DRAM. If both processes are on one host, all bytes may have been moved already when
        this method returns.
        """
        number = next(self._numbers)
        with self._translated():
            self._transfers[number] = self._agent.initialize_xfer(
                direction,
                self._agent.get_xfer_descs(local, memory),
                self._agent.get_xfer_descs(remote, NixlMemoryKind.DRAM),
                peer,
            )
            if self._agent.transfer(self._transfers[number]) == "ERR":
                raise NixlAgentFailed("a transfer failed at its start")
        return number

    def is_done(self, transfer: int) -> bool:
        """Return whether all bytes of the transfer have been moved.

        After True, the number of the transfer is no longer valid.
        """
        with self._translated():
            state = self._agent.check_xfer_state(self._transfers[transfer])
            if state == "PROC":
                return False
            if state != "DONE":
                raise NixlAgentFailed("a transfer failed")
            self._agent.release_xfer_handle(self._transfers.pop(transfer))
        return True

    def nudge(self, peer: str) -> None:
        """Ask the peer to continue the transfers whose bytes the peer's processor has to move."""
        with self._translated():
            self._agent.send_notif(peer, b"nudge")

    def attend(self) -> bool:
        """Serve peers that connect, and continue transfers; return whether a peer has called `nudge`."""
        with self._translated():
            return bool(self._agent.get_new_notifs())

    def close(self) -> None:
        """End all transfers. This takes 0.2 s; afterwards no transfer writes to this process's memory."""
        for transfer in self._transfers.values():
            with contextlib.suppress(*self._failures):  # if a transfer cannot be cancelled, it ends with the agent
                transfer.release()
        self._transfers.clear()
        self._registered.clear()
        self._agent = None  # drops the last reference to the agent, so that the agent ends

    def _translated(self) -> "_Translated":
        return _Translated(self._failures)


class _Translated:
    def __init__(self, failures: tuple[type[Exception], ...]):
        self._failures = failures

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._failures):
            raise NixlAgentFailed(str(error) or type(error).__name__) from error
