"""Fault matrix: the components, faults and phases, the figures of a cell, and why some combinations are impossible."""

import shutil
from enum import StrEnum

from msgspec import Struct


class Component(StrEnum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"
    REGISTRY = "registry"
    REDIS = "redis"
    SUPERVISOR = "supervisor"
    PLANNER = "planner"


class MatrixFault(StrEnum):
    KILL = "kill"
    STOP = "stop"  # SIGSTOP without a SIGCONT
    STOP_6S = "stop_6s"
    CUT = "cut"
    DELAY = "delay"
    SLOW_DISK = "slow_disk"
    FULL_DISK = "full_disk"
    NO_FILES = "no_files"
    MEMORY = "memory"
    CORRUPT_FRAME = "corrupt_frame"
    DUPLICATED_EVENTS = "duplicated_events"
    REORDERED_EVENTS = "reordered_events"


class CellPhase(StrEnum):
    IDLE = "idle"  # requests that were sent after the fault had begun, and before it ended
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    DRAIN = "drain"  # answers of a worker that was draining


class Cell(Struct, kw_only=True):
    """The effect of one fault on the requests of one phase."""

    component: str
    fault: str
    phase: str
    requests: int
    lost: int  # number of tokens, as for the next two fields
    repeated: int
    wrong: int
    failed: int  # number of answers that ended with an error that permits a retry
    leaked: int  # number of things (reservations, leases, files, …) that were held after all requests had ended
    seconds: float  # the longest time without a token, after the fault, of an answer in this phase
    served_seconds: float  # seconds from the fault until a request that was sent after the fault was answered
    broken: list[str] = []  # promises that this cell breaks


ON_LINK = (
    MatrixFault.CUT, MatrixFault.DELAY, MatrixFault.CORRUPT_FRAME, MatrixFault.DUPLICATED_EVENTS, MatrixFault.REORDERED_EVENTS,
)  # fmt: skip
ON_DISK = (MatrixFault.SLOW_DISK, MatrixFault.FULL_DISK)
ON_EVENTS = (MatrixFault.DUPLICATED_EVENTS, MatrixFault.REORDERED_EVENTS)
LIMITS = (MatrixFault.NO_FILES, MatrixFault.MEMORY)


def why_impossible(component: Component, fault: MatrixFault) -> str:
    """Return why a combination cannot happen, or cannot be produced on this machine; empty if it can."""
    no_link = "has no link of its own: it is a part of the links of the other components"
    match component:
        case Component.ROUTER if fault in ON_LINK:
            return f"the router {no_link}"
        case Component.REGISTRY if fault not in (MatrixFault.CUT, MatrixFault.DELAY):
            return "the registry is the router's control port, and shares its process: see router"
        case Component.REDIS if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
            return "neither redis-server nor valkey-server is installed"
        case Component.REDIS if fault not in (MatrixFault.KILL, MatrixFault.STOP, MatrixFault.STOP_6S):
            return "Redis is another project's process; only its absence and its silence matter to a store node"
        case Component.SUPERVISOR | Component.PLANNER if fault not in (
            MatrixFault.KILL,
            MatrixFault.STOP,
            MatrixFault.STOP_6S,
        ):
            return f"the {component} is on no path of a request; only its absence and its silence can matter"
        case Component.STORE if fault in (MatrixFault.CORRUPT_FRAME, *ON_EVENTS):
            return "calls to the store are gRPC, which ends a connection with a corrupt frame and never repeats one"
    if fault in ON_DISK and component is not Component.STORE:
        return f"the {component} keeps nothing on disk"
    if fault in ON_DISK and shutil.which("strace") is None:
        return "strace, which slows and fails the system calls of a disk, is not installed"
    return ""


def why_impossible_phase(component: Component, phase: CellPhase) -> str:
    """Return why a component's faults have no cell for a phase; empty if they have one."""
    if component in (Component.SUPERVISOR, Component.PLANNER) and phase in (CellPhase.TRANSFER, CellPhase.DRAIN):
        return (
            f"the {component} takes no part in it: its cells for prefill and decode stand for every request under way"
        )
    return ""
