"""Faults of the API server that tests order: which requests fail, how, and how often.

A test orders a fault by `POST /fleet-test/faults` and reads all faults by `GET /fleet-test/faults`. A fault affects the
requests that match all of its conditions. It ends after it has affected `times` requests.
"""

from typing import Literal

import msgspec

Kind = Literal["status", "deny", "forbid", "expire", "cut", "delay", "hold", "drop"]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Describes one kind of failure, and the requests that it affects.

    - `status`: the server answers with `code`, and with `Retry-After: retry_after_seconds` if that is given, and does
      nothing else. Many answers with 409 are a conflict storm.
    - `deny`: a ValidatingAdmissionPolicy refuses the write, with `message`.
    - `forbid`: the server answers that the sender lacks the right to do this. After a restart, a real server gives
      this answer to everybody until it has read the roles.
    - `expire`: a watch gets an ERROR event with code 410 after `events` events, and ends.
    - `cut`: the body of the answer ends in the middle; the body of a watch ends after `events` events.
    - `drop`: the server carries out the request, but closes the connection instead of answering.
    - `delay`: the server carries out the request `seconds` late.
    - `hold`: the server carries out the request when the fault is removed. If a test holds the requests of a leader
      until its lease has expired, there are two leaders, and the writes of the first one arrive late.
    """

    kind: Kind
    verb: str = ""
    """One of get, list, watch, create, update, patch, delete and deletecollection. Empty matches every verb; empty also
    matches everything in the next four conditions."""
    resource: str = ""
    """The plural of the kind, with the subresource if the fault is for one: `leases`, `deployments/status`."""
    namespace: str = ""
    name: str = ""
    user: str = ""
    """The bearer token, or the beginning of the User-Agent."""
    times: int = 1
    """Number of requests that the fault affects; -1: it affects requests until it is removed."""
    skip: int = 0
    """Number of matching requests that pass before the fault begins."""
    code: int = 500
    retry_after_seconds: int | None = None
    seconds: float = 0.0
    events: int = 0
    message: str = ""
    """The message in the answers of `status` and `deny`."""
    struck: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a request by the properties that faults, permissions and the request log use."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    user: str
    agent: str


class Faults:
    def __init__(self) -> None:
        self._ordered: dict[int, Fault] = {}
        self._last = 0

    def add(self, fault: Fault) -> int:
        self._last += 1
        self._ordered[self._last] = fault
        return self._last

    def remove(self, number: int) -> None:
        self._ordered.pop(number, None)

    def clear(self) -> None:
        self._ordered.clear()

    def ordered(self) -> dict[int, Fault]:
        return dict(self._ordered)

    def stands(self, fault: Fault) -> bool:
        """Return whether a fault has not been removed yet, so that a request that it holds still has to wait."""
        return any(each is fault for each in self._ordered.values())

    def strike(self, request: Request) -> Fault | None:
        """Return the fault that affects this request, and count the request as one of its `times`; None if no fault does."""
        for fault in self._ordered.values():
            if not _fits(fault, request):
                continue
            if fault.skip > 0:
                fault.skip -= 1
            elif fault.times != 0:
                fault.times -= fault.times > 0
                fault.struck += 1
                return fault
        return None


def _fits(fault: Fault, request: Request) -> bool:
    return (
        (not fault.verb or fault.verb == request.verb)
        and (not fault.resource or fault.resource == request.resource)
        and (not fault.namespace or fault.namespace == request.namespace)
        and (not fault.name or fault.name == request.name)
        and (not fault.user or fault.user == request.user or request.agent.startswith(fault.user))
        and not (fault.kind == "expire" and request.verb != "watch")
    )
