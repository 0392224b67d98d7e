"""Overflow port: how the OpenAI API hands requests that the model's own workers cannot take to a hosted endpoint.

`fleet.backends.hosted.overflow` implements it.
"""

from typing import Protocol

from fleet.core.errors import RequestRejected
from fleet.frontend.generation import OverflowTerms
from fleet.frontend.openai.requests import OpenAiRequest
from fleet.net.http.exchange import Exchange


class OverflowOffer(OverflowTerms, Protocol):
    """One request that may overflow."""

    async def serve(self, exchange: Exchange, refused: RequestRejected) -> RequestRejected | None:
        """Answer a request that the router has refused.

        Returns:
            The rejection to answer instead; None if the exchange has its answer.

        Raises:
            RequestRejected: The tenant's limit is reached, or an answer that has begun broke off.
            ClientDisconnected: The client has gone.
        """
        ...


class Overflow(Protocol):
    """All hosted endpoints of one router process."""

    def offer(self, parsed: OpenAiRequest, exchange: Exchange, authorization: str) -> OverflowOffer | None:
        """Return the offer of a request; None if it must not overflow."""
        ...
