"""A NIXL agent with the UCX backend, in our words: translation only. Needs ``nixl``.

NIXL raises a dozen exceptions that share no base, returns states as strings and has no deadlines; UCX prints, and may end
the process when a peer goes away at a bad moment, so that a node keeps its agent in a process of its own.
"""

import importlib
import inspect
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct

BACKEND = "UCX"


class AgentFailed(Exception):
    """The agent, the way to its peer, or the peer: nothing more can be had from it. Close it."""


class Memory(StrEnum):
    """Where registered bytes lie."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class Way(StrEnum):
    """Of a transfer, seen from who starts it."""

    READ = "READ"
    WRITE = "WRITE"


class Span(Struct, frozen=True, order=True):
    """Consecutive bytes of a process."""

    device: int  # 0 for DRAM
    address: int
    length: int


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same bytes in as few spans as possible."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if last is not None and last.device == span.device and span.address <= last.address + last.length:
            end = max(last.address + last.length, span.address + span.length)
            found[-1] = Span(last.device, last.address, end - last.address)
        else:
            found.append(span)
    return found


class Agent:
    """One end of NIXL. Not for several threads at a time. All methods raise `AgentFailed`."""

    def __init__(self, name: str):
        """Takes half a second: UCX looks at all the devices of the machine."""
        try:
            api = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise AgentFailed(f"nixl cannot be imported: {error}; `fleet doctor` says more") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._failures = tuple(
            kind for _, kind in inspect.getmembers(bindings, inspect.isclass) if issubclass(kind, Exception)
        )
        with self._translated():
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])  # it would spin
            self._agent = api.nixl_agent(name, config)
        if BACKEND not in self._agent.backends:
            raise AgentFailed("nixl has no UCX plugin here; `fleet doctor` says more")

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and the memory that it has registered."""
        with self._translated():
            return bytes(self._agent.get_agent_metadata())

    def register(self, spans: Sequence[Span], memory: Memory = Memory.DRAM) -> Any:
        """Make memory usable in transfers, until `deregister` of what is returned."""
        with self._translated():
            return self._agent.register_memory([(each.address, each.length, each.device, "") for each in spans], memory)

    def deregister(self, registered: Any) -> None:
        with self._translated():
            self._agent.deregister_memory(registered)

    def add_peer(self, metadata: bytes) -> str:
        """Get to know another agent; returns its name."""
        with self._translated():
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def start(
        self, way: Way, local: Sequence[Span], remote: Sequence[Span], peer: str, memory: Memory = Memory.DRAM
    ) -> Any:
        """Begin a transfer between as many spans on both sides, pairwise of one length; the peer's are in its DRAM.

        Where both processes are on one host, the bytes may be there when it returns.
        """
        with self._translated():
            transfer = self._agent.initialize_xfer(
                way,
                self._agent.get_xfer_descs(_table(local), memory),
                self._agent.get_xfer_descs(_table(remote), Memory.DRAM),
                peer,
            )
            if self._agent.transfer(transfer) == "ERR":
                raise AgentFailed("a transfer failed at its start")
            return transfer

    def is_done(self, transfer: Any) -> bool:
        with self._translated():
            state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise AgentFailed("a transfer failed")
        return bool(state == "DONE")

    def end(self, transfer: Any) -> None:
        """Of a transfer that is done."""
        with self._translated():
            self._agent.release_xfer_handle(transfer)

    def nudge(self, peer: str) -> None:
        """Have the peer attend to its transfers, where it is its processor that moves the bytes."""
        with self._translated():
            self._agent.send_notif(peer, b"nudge")

    def attend(self) -> bool:
        """Let peers connect, and move their bytes; whether one has nudged."""
        with self._translated():
            return bool(self._agent.get_new_notifs())

    def close(self) -> None:
        """Ends all transfers: when this returns, nothing writes to this process's memory any more. Takes 0.2 s."""
        self._agent = None

    def _translated(self) -> "_Translated":
        return _Translated(self._failures)


class _Translated:
    def __init__(self, failures: tuple[type[Exception], ...]):
        self._failures = failures

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._failures):
            raise AgentFailed(str(error) or type(error).__name__) from error


def _table(spans: Sequence[Span]) -> Any:
    return np.array([(each.address, each.length, each.device) for each in spans], dtype=np.uint64)
