"""Prompt reader: reads the requests of gateways in the same way as requests to the router's own HTTP API."""

import secrets
from typing import Protocol

from fleet.core.clock import Clock
from fleet.core.errors import RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.frontend.generation import Generation
from fleet.frontend.openai.relay import Relay
from fleet.frontend.openai.relayed_paths import CHAT, EMBEDDINGS, MESSAGES, RESPONSES
from fleet.frontend.openai.requests import read_chat, read_completion
from fleet.frontend.openai.translated.api import TranslatedApi, rename_translated_field, without_needless_budget
from fleet.frontend.openai.translated.messages import MESSAGES_API
from fleet.frontend.openai.translated.responses import RESPONSES_API
from fleet.net.status_codes import rename_field
from fleet.router.messages import Arrived
from fleet.router.tenants import Tenants

TRANSLATED_APIS = {RESPONSES: RESPONSES_API, MESSAGES: MESSAGES_API}
"""APIs whose requests are translated to chats, by their paths."""


class PromptReaderApi(Protocol):
    """Port that reads the bodies of gateways' requests, and charges tenants for the answers."""

    def check_key(self, authorization: str) -> None:
        """Check the key of a request before its body is read.

        Args:
            authorization: The client's key as ``Bearer KEY``; empty if it has sent none.

        Raises:
            RequestRejected: Clients need a key, and this client has sent no known key (UNAUTHENTICATED).
        """
        ...

    async def arrival(self, path: str, body: bytes, authorization: str) -> Arrived:
        """Check a request, charge its tenant for the prompt, and return what placement needs to know of the request.

        Args:
            path: The path of completions, chats, embeddings, the Responses API or the Messages API.
            body: The complete body.
            authorization: The client's key as ``Bearer KEY``; empty if it has sent none.

        Raises:
            RequestRejected: The request is invalid, its model or key is unknown, or a limit of its tenant is exceeded.
        """
        ...

    def answered(self, tenant: str, tokens: int) -> None:
        """Take answer tokens from a tenant's rate limit, and add them to its usage."""
        ...


class ApiPromptReader:
    """Reads gateways' requests as the router's own HTTP API reads requests. Implements `PromptReaderApi`."""

    def __init__(self, generation: Generation, relay: Relay | None, tenants: Tenants, clock: Clock) -> None:
        self._generation = generation
        self._relay = relay
        self._tenants = tenants
        self._clock = clock

    def check_key(self, authorization: str) -> None:
        self._tenants.tenant(authorization, "")

    async def arrival(self, path: str, body: bytes, authorization: str) -> Arrived:
        request_id = RequestId(f"pick-{secrets.token_hex(8)}")
        if self._relay is not None:
            arrived = await self._relay.arrival(path, body, request_id, authorization)
            if arrived is not None:
                return arrived
        if path == EMBEDDINGS:
            raise invalid("model", "no model here gives embeddings")
        if (api := TRANSLATED_APIS.get(path)) is not None:
            return await self._translated_arrival(api, body, request_id, authorization)
        read = read_chat if path == CHAT else read_completion
        asked = await self._generation.read_body(read, body, request_id, self._clock.now())
        try:
            return await self._generation.arrival(asked.request, authorization)
        except RequestRejected as refused:
            raise rename_field(refused, asked.names) from refused

    async def _translated_arrival(
        self, api: TranslatedApi, body: bytes, request_id: RequestId, authorization: str
    ) -> Arrived:
        try:
            asked = await self._generation.read_body(api.read, body, request_id, self._clock.now())
        except RequestRejected as refused:
            raise rename_field(refused, api.names) from refused
        asked = without_needless_budget(asked, self._generation.limits_reasoning)
        try:
            return await self._generation.arrival(asked.chat.request, authorization)
        except RequestRejected as refused:
            raise rename_translated_field(refused, asked, api) from refused

    def answered(self, tenant: str, tokens: int) -> None:
        self._tenants.used(tenant, tokens, self._clock.now())
