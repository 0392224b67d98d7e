"""Faults that tests order: which requests go wrong, how, and how often.

A test orders them by `POST /fleet-test/faults` and reads them by `GET /fleet-test/faults`. A fault strikes the requests
that match all of its conditions, as often as it says; then it is over.
"""

from typing import Literal

import msgspec

Kind = Literal["status", "deny", "forbid", "expire", "cut", "delay", "hold", "drop"]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One kind of failure, and the requests that it strikes.

    - `status`: the answer is `code`, with `Retry-After: retry_after_seconds` if that is given; nothing is done. 409 is
      a conflict:
      many of them are a conflict storm.
    - `deny`: a ValidatingAdmissionPolicy refuses the write, with `message`.
    - `forbid`: the sender lacks the right to do this. After a restart, the server says so to everybody until it has
      read the roles.
    - `expire`: a watch gets an ERROR event with code 410 after `events` events, and ends.
    - `cut`: a watch, or the body of any other answer, breaks off in the middle: a watch after `events` events.
    - `drop`: the request is carried out, but its answer never comes: the connection closes.
    - `delay`: the request is carried out `seconds` late.
    - `hold`: the request is carried out when the fault is removed. When the requests of one leader are held while its
      lease runs
      out, there are two leaders, and the first one's writes come late.
    """

    kind: Kind
    verb: str = ""
    """One of get, list, watch, create, update, patch, delete and deletecollection; like other conditions, it matches all
    if empty."""
    resource: str = ""
    """The plural, with the subresource if one is meant: `leases`, `deployments/status`."""
    namespace: str = ""
    name: str = ""
    user: str = ""
    """The bearer token, or the beginning of the User-Agent."""
    times: int = 1
    """How many requests it strikes; -1 strikes until it is removed."""
    skip: int = 0
    """How many matching requests pass first."""
    code: int = 500
    retry_after_seconds: int | None = None
    seconds: float = 0.0
    events: int = 0
    message: str = ""
    """The words of `status` and `deny`."""
    struck: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the terms of faults, permissions and the log."""

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
        """Return whether a held request still has to wait."""
        return any(each is fault for each in self._ordered.values())

    def strike(self, request: Request) -> Fault | None:
        """Return the fault that this request suffers, and count it."""
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
