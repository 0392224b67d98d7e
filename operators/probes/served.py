"""Probes: requests for a token, sent through the routers of a deployment over HTTP, as its clients send theirs.

Rules:

1. An answer counts when it is a completion of the model by the worker that was asked for, and of a pair when a prefill worker computed the prompt.
2. Every prompt begins with other words than all before, so that no cache has it, and is long enough to fill a block of most engines.
3. Of what went wrong the status is told, and the text of a refusal of ours; what else somebody answers may hold anything. No key is told.
4. A Service leads where anybody who may write Services or EndpointSlices has it lead: nothing that has a key goes there. What is asked for through
   it has none; where that is answered with 401, the same goes with the key to the address of a router's pod, which only its node can write.
5. A probe has no right of way: priority counts among requests of one tenant, and one with a key of its own is let in before tenants that
   have more waiting anyway (`fleet.router.queueing.admission_queue`, rule 4). It says how long it can wait, so that a router without room refuses it at once.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import ceil

import aiohttp
import msgspec
from msgspec import Struct

from fleet.core.errors import Reason
from fleet.core.requests import Source
from fleet.core.roles import Phase
from operators.manifests.names import HTTP, host_of
from operators.probes.evidence import Probe, ProbeCompletion, ProbeFailure

BUSY = frozenset({Reason.QUEUE_FULL, Reason.RATE_LIMITED})
"""Of an admission that lets in no more, and not of something that fails."""

PATIENCE = 0.9
"""Of the deadline: what a router says at its end still comes in time."""

LONGEST_ANSWER = 64 << 10
MOST_CHARACTERS = 200
NO_SUCH_JSON = (msgspec.MsgspecError, RecursionError)
"""The second: what is nested a thousand times."""

WORDS = " ".join(f"and then comes number {number}," for number in range(40))
"""Some 200 tokens."""

ELSEWHERE = frozenset({Source.DIRECT, Source.STORE})


class _Origin(Struct, frozen=True):
    source: str
    blocks: int = 0


class _Phase(Struct, frozen=True):
    phase: str
    worker_id: str
    prompt_blocks: int = 0
    origins: tuple[_Origin, ...] = ()


class _Fleet(Struct, frozen=True):
    kv: tuple[_Phase, ...] = ()


class _Choice(Struct, frozen=True):
    text: str


class _Usage(Struct, frozen=True):
    completion_tokens: int


class _CompletionBody(Struct, frozen=True):
    choices: tuple[_Choice, ...]
    usage: _Usage
    fleet: _Fleet = _Fleet()


class _Error(Struct, frozen=True):
    code: Reason
    message: str


class _Refusal(Struct, frozen=True):
    error: _Error


def router_address(host: str) -> str:
    """Of a pod, by its IP address."""
    return f"[{host}]:{HTTP}" if ":" in host else f"{host}:{HTTP}"


def service_address(namespace: str, service: str) -> str:
    """As pods of any namespace dial it."""
    return f"{host_of(service, namespace)}:{HTTP}"


class ServedProbes:
    """Implements `operators.probes.prober.ProbeSender`."""

    def __init__(
        self,
        keys: Mapping[str, str],
        deadline_seconds: float,
        service: Callable[[str, str], str] = service_address,
        router: Callable[[str], str] = router_address,
    ) -> None:
        """`keys` are API keys, by `namespace/name` of deployments; the others say where a Service of a namespace, and a pod's IP address, are dialled."""
        self._keys = keys
        self._deadline_seconds = deadline_seconds
        self._service = service
        self._router = router

    async def ask(self, probe: Probe) -> ProbeCompletion | ProbeFailure:
        """See `fleet.net.kubernetes.ports`."""
        key = self._keys.get(f"{probe.namespace}/{probe.deployment}", "")
        try:
            async with asyncio.timeout(self._deadline_seconds):
                found = await self._sent(probe, self._service(probe.namespace, probe.service), "")
                if not (isinstance(found, ProbeFailure) and found.wants_key and key):
                    return found
                if not probe.router_address:
                    return ProbeFailure(0, "its routers want an API key, and none of them has an address")
                return await self._sent(probe, self._router(probe.router_address), key)
        except TimeoutError:
            return ProbeFailure(0, f"no answer within {self._deadline_seconds:g} s")

    async def _sent(self, probe: Probe, address: str, key: str) -> ProbeCompletion | ProbeFailure:
        """One request, on a connection of its own: to whatever is there now. Its deadline is the caller's."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = msgspec.json.encode(_request(probe, self._deadline_seconds))
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(
                    f"http://{address}/v1/completions", data=content, headers=headers, allow_redirects=False
                ) as response,
            ):
                answered = await _read(response)
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return ProbeFailure(0, f"no answer: {type(error).__name__}")
        if status == HTTPStatus.OK:
            return _answer(probe, answered)
        if status == HTTPStatus.UNAUTHORIZED:
            text = "its routers do not take the key" if key else "its routers want an API key"
            return ProbeFailure(status, text, wants_key=True)
        return _refusal(status, answered, key)


def _request(probe: Probe, seconds: float) -> dict[str, object]:
    """The first token of a pair comes from the prefill worker: for the other one to take part it has to be two."""
    placement = {"placement": "disaggregated"} if probe.pair else {}
    return {
        "model": probe.model,
        "prompt": f"{secrets.token_hex(8)} {WORDS}",
        "max_tokens": 2 if probe.pair else 1,
        "ignore_eos": True,
        "temperature": 0,
        "fleet": {"pin": probe.worker, "timeout_ms": ceil(seconds * PATIENCE * 1000)} | placement,
    }


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > LONGEST_ANSWER:
            break
    return bytes(content)


def _answer(probe: Probe, content: bytes) -> ProbeCompletion | ProbeFailure:
    try:
        completion = msgspec.json.decode(content, type=_CompletionBody)
    except NO_SUCH_JSON:
        return ProbeFailure(HTTPStatus.OK, "what was answered is no completion")
    if not completion.choices or completion.usage.completion_tokens < 1:
        return ProbeFailure(HTTPStatus.OK, "the completion has no token")
    phases = {each.phase: each for each in completion.fleet.kv}
    last = phases.get(Phase.DECODE if probe.pair else Phase.AGGREGATED) or phases.get(Phase.DECODE)
    if last is None or last.worker_id != probe.worker:
        return ProbeFailure(HTTPStatus.OK, "another worker answered")
    if not probe.pair:
        return ProbeCompletion()
    if Phase.PREFILL not in phases:
        return ProbeFailure(HTTPStatus.OK, "no prefill worker computed the prompt")
    taken = sum(each.blocks for each in last.origins if each.source in ELSEWHERE)
    return ProbeCompletion(handed=True if taken else False if last.prompt_blocks > 1 else None)


def _refusal(status: int, content: bytes, key: str) -> ProbeFailure:
    try:
        error = msgspec.json.decode(content, type=_Refusal).error
    except NO_SUCH_JSON:
        return ProbeFailure(status, "not in words of a router")
    if status == HTTPStatus.TOO_MANY_REQUESTS and error.code in BUSY:
        return ProbeFailure(status, error.code, busy=True)  # how long one would wait is otherwise each time
    # What is not printable may make terminals do things.
    text = " ".join("".join(each if each.isprintable() else " " for each in error.message).split())
    if key:
        text = text.replace(key, "(key)")
    return ProbeFailure(status, f"{error.code}: {text[:MOST_CHARACTERS]}")
