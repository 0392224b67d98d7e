"""HTTP probes: sends requests for one or two tokens, or for one vector, to the routers of a deployment, as clients do.

Rules:

1. An answer counts if it is a completion by the worker that the probe names. If a prefill worker has to take part, the
   answer must also show that a prefill worker has computed the prompt. If the model does not generate, a vector by this
   worker counts.
2. Every prompt begins with new random characters, so that no cache contains it. The prompt of a completion is long
   enough to fill at least one block in most engines. The text for a vector is short, because many embedding models take
   only short texts.
3. The deployment's status shows the HTTP status of a failure, and the text of a rejection by a router of Fleet. The
   texts of other servers are not shown, because they may contain secrets. API keys are never shown.
4. An API key is never sent to a Service, because everybody who may write Services or EndpointSlices could redirect the
   request and read the key. So the operator first sends the request to the Service without a key. If the answer is 401,
   it sends the request with the key to the IP address of a router's pod. Only the node of the pod can set this address.
   The key crosses the network unencrypted, so it is sent only if the setting `probe.insecure` allows it. Routers with
   TLS need the setting too, because the operator does not verify their certificates. It does not know the authority that
   signed these certificates, and they do not contain the addresses of pods.
5. A probe has the normal priority. A higher one would not help, because priority counts only among requests of one
   tenant, and a tenant with few waiting requests is admitted first anyway (`fleet.router.queueing.admission_queue`, rule
   4). The probe states a time limit, so that a router that cannot place it in time rejects it.
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
from fleet.frontend.openai.relayed_paths import COMPLETIONS, POOLING
from fleet.net.connection_errors import connection_problem
from operators.manifests.names import HTTP, host_of
from operators.probes.evidence import Probe, ProbeCompletion, ProbeFailure

BUSY = frozenset({Reason.QUEUE_FULL, Reason.RATE_LIMITED})
"""Reasons of a rejection that show only that a router is busy. With such a reason, the deployment does not count as
failing."""

PATIENCE = 0.9
"""The deadline that a probe's request states to the router, as a share of the time limit of the probe. Because the
deadline is earlier, a rejection by the router arrives before the prober gives up."""

LONGEST_ANSWER = 64 << 10
MOST_CHARACTERS = 200
NO_SUCH_JSON = (msgspec.MsgspecError, RecursionError)
"""Errors that the decoder raises if an answer is not the expected JSON; deeply nested JSON raises RecursionError."""

WORDS = " ".join(f"and then comes number {number}," for number in range(40))
"""Text of about 200 tokens that follows the random characters in the prompt of a completion."""

WITHHELD = "its routers want an API key, and the operator's key would cross the network in the clear"
WITHHELD_TLS = (
    "its routers want an API key, and the operator does not verify the certificate behind which the key would be read"
)

ELSEWHERE = frozenset({Source.DIRECT, Source.STORE})


class _Origin(Struct, frozen=True):
    source: str
    blocks: int = 0


class _Phase(Struct, frozen=True):
    phase: str
    worker_id: str
    prompt_blocks: int = 0
    origins: tuple[_Origin, ...] = ()


class _ProbeFleet(Struct, frozen=True):
    kv: tuple[_Phase, ...] = ()


class _ProbeChoice(Struct, frozen=True):
    text: str


class _Usage(Struct, frozen=True):
    completion_tokens: int


class _CompletionBody(Struct, frozen=True):
    choices: tuple[_ProbeChoice, ...]
    usage: _Usage
    fleet: _ProbeFleet = _ProbeFleet()


class _ProbeVector(Struct, frozen=True):
    data: tuple[float, ...]


class _VectorFleet(Struct, frozen=True):
    workers: tuple[str, ...] = ()


class _VectorBody(Struct, frozen=True):
    data: tuple[_ProbeVector, ...]
    fleet: _VectorFleet = _VectorFleet()


class _ProbeError(Struct, frozen=True):
    code: Reason
    message: str


class _Refusal(Struct, frozen=True):
    error: _ProbeError


def router_address(host: str) -> str:
    """Return the host:port of a router's HTTP port for the IP address of its pod."""
    return f"[{host}]:{HTTP}" if ":" in host else f"{host}:{HTTP}"


def service_address(namespace: str, service: str) -> str:
    """Return the host:port of a Service, with a host name that pods of any namespace can resolve."""
    return f"{host_of(service, namespace)}:{HTTP}"


class HttpProbeSender:
    """Sends probes over HTTP. Implements `operators.probes.prober.ProbeSender`."""

    def __init__(
        self,
        keys: Mapping[str, str],
        deadline_seconds: float,
        *,
        insecure: bool,
        service: Callable[[str, str], str] = service_address,
        router: Callable[[str], str] = router_address,
    ) -> None:
        """Create the sender.

        Args:
            keys: API key of each deployment that needs one, by the deployment's `namespace/name`.
            deadline_seconds: Time limit of one probe in seconds.
            insecure: If true, keys may cross the network unencrypted; if false, no key is sent.
            service: Returns the host:port of a Service; its arguments are namespace and name.
            router: Returns the host:port of a router for the IP address of its pod.
        """
        self._keys = keys
        self._deadline_seconds = deadline_seconds
        self._insecure = insecure
        self._service = service
        self._router = router

    async def ask(self, probe: Probe) -> ProbeCompletion | ProbeFailure:
        """Send a probe, and return the result; raise no errors.

        If the routers demand an API key, send the probe again with the key, if the operator has it and may send it.
        """
        key = self._keys.get(f"{probe.namespace}/{probe.deployment}", "")
        try:
            async with asyncio.timeout(self._deadline_seconds):
                found = await self._sent(probe, self._service(probe.namespace, probe.service), "")
                if not (isinstance(found, ProbeFailure) and found.wants_key and key):
                    return found
                if not self._insecure:
                    why = WITHHELD_TLS if probe.tls else WITHHELD
                    return ProbeFailure(found.status, why, wants_key=True, key_withheld=True)
                if not probe.router_address:
                    return ProbeFailure(0, "its routers want an API key, and none of them has an address")
                return await self._sent(probe, self._router(probe.router_address), key)
        except TimeoutError:
            return ProbeFailure(0, f"no answer within {self._deadline_seconds:g} s")

    async def _sent(self, probe: Probe, address: str, key: str) -> ProbeCompletion | ProbeFailure:
        """Send one request on a new connection, so that it reaches the present pods, and return the result of the probe.

        The caller sets the time limit.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = msgspec.json.encode(_request(probe, self._deadline_seconds))
        scheme, path = "https" if probe.tls else "http", POOLING if probe.wants_vector else COMPLETIONS
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(
                    f"{scheme}://{address}{path}", data=content, headers=headers, allow_redirects=False, ssl=False
                ) as response,
            ):
                answered = await _read(response)
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return ProbeFailure(0, f"no answer: {connection_problem(error)}")
        if status == HTTPStatus.OK:
            return _answer(probe, answered)
        if status == HTTPStatus.UNAUTHORIZED:
            text = "its routers do not take the key" if key else "its routers want an API key"
            return ProbeFailure(status, text, wants_key=True)
        return _refusal(status, answered, key)


def _request(probe: Probe, seconds: float) -> dict[str, object]:
    """Return the body of a probe's HTTP request, as an object for JSON.

    If a prefill worker takes part, two tokens are requested, because the prefill worker computes the first one.
    """
    options: dict[str, object] = {"pin": probe.worker, "timeout_ms": ceil(seconds * PATIENCE * 1000)}
    if probe.wants_vector:
        return {"model": probe.model, "input": secrets.token_hex(8), "fleet": options}
    placement = {"placement": "disaggregated"} if probe.pair else {}
    return {
        "model": probe.model,
        "prompt": f"{secrets.token_hex(8)} {WORDS}",
        "max_tokens": 2 if probe.pair else 1,
        "ignore_eos": True,
        "temperature": 0,
        "fleet": options | placement,
    }


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > LONGEST_ANSWER:
            break
    return bytes(content)


def _answer(probe: Probe, content: bytes) -> ProbeCompletion | ProbeFailure:
    if probe.wants_vector:
        return _vector_answer(probe, content)
    try:
        completion = msgspec.json.decode(content, type=_CompletionBody)
    except NO_SUCH_JSON:
        return ProbeFailure(HTTPStatus.OK, "the answer is not a completion")
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


def _vector_answer(probe: Probe, content: bytes) -> ProbeCompletion | ProbeFailure:
    try:
        answer = msgspec.json.decode(content, type=_VectorBody)
    except NO_SUCH_JSON:
        return ProbeFailure(HTTPStatus.OK, "the answer is not a vector")
    if not answer.data or not answer.data[0].data:
        return ProbeFailure(HTTPStatus.OK, "the answer has no vector")
    if answer.fleet.workers != (probe.worker,):
        return ProbeFailure(HTTPStatus.OK, "another worker answered")
    return ProbeCompletion()


def _refusal(status: int, content: bytes, key: str) -> ProbeFailure:
    try:
        error = msgspec.json.decode(content, type=_Refusal).error
    except NO_SUCH_JSON:
        return ProbeFailure(status, "the answer is not a router's error")
    if status == HTTPStatus.TOO_MANY_REQUESTS and error.code in BUSY:
        # The router's message is left out. It contains a waiting time, so the status would change with each probe.
        return ProbeFailure(status, error.code, busy=True)
    # Unprintable characters are replaced, because they may control a terminal.
    text = " ".join("".join(each if each.isprintable() else " " for each in error.message).split())
    if key:
        text = text.replace(key, "(key)")
    return ProbeFailure(status, f"{error.code}: {text[:MOST_CHARACTERS]}")
