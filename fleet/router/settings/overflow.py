"""Overflow settings: the hosted endpoint that takes requests of a model when its own workers cannot."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from kvstore.net.addresses import refuse_credentials, refuse_plain_key

Dollars = Annotated[float, Meta(ge=0, le=1e9)]
WaitSeconds = Annotated[float, Meta(gt=0, le=86_400)]


class OverflowSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible endpoint that takes HTTP requests which would wait too long here, or would be refused because of high load.

    A spending limit bounds the cost of the endpoint. The prompts of requests that overflow leave your cluster. Only completions and chats
    with one answer overflow, not requests over gRPC, the Open Inference Protocol, the Responses API or the Messages API.
    """

    url: Annotated[str, Meta(min_length=1)]
    """URL of the endpoint: ``https://host`` or ``http://host:port``, with the path before ``/v1`` if there is one."""

    hosted_model: str = ""
    """Name of the model at the endpoint; empty: the same name as in this cluster."""

    api_key_file: str = ""
    """File with the bearer token of the endpoint. It is read for each request, so that a key can be replaced; empty: no token is sent.
    The client's own token is never passed on."""

    insecure: bool = False
    """Allow sending the token over http, without encryption, to another host. Set this only for networks to which nobody else has access."""

    dollars_per_hour: Annotated[float, Meta(gt=0, le=1e9)]
    """The most that all requests of any 60 minutes may cost, by the prices below. When a request is sent, the price of its prompt and of
    its longest possible answer is charged. When the endpoint reports the usage, the price of the unused tokens is credited. If the
    endpoint reports no usage, nothing is credited."""

    dollars_per_million_prompt_tokens: Dollars
    """Price of the endpoint for prompts, in dollars per million tokens. Cached tokens count in full, so the real bill may be lower."""

    dollars_per_million_answer_tokens: Dollars
    """Price of the endpoint for answers, in dollars per million tokens."""

    routers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of routers that do not share a `ledger`. Each of them may spend `dollars_per_hour` divided by this number."""

    ledger: str = ""
    """File in which the router processes of one machine count their spending together. The file stays when the processes end. Empty: the
    processes of one `fleet serve router --processes` count together until they end, and any other router counts by itself from its start."""

    after_seconds: WaitSeconds = 5.0
    """A request overflows if its predicted wait for a worker is longer than this. The default is half the default of the router's setting
    `max_queue_seconds`, above which a request is refused. A first token within ten seconds is then still likely at the endpoint. Requests
    that are refused because of high load overflow as well."""

    max_answer_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    """The longest answer, in tokens. It is the limit of requests that set none, and requests that ask for more do not overflow. While a
    request runs, the price of an answer of its full limit is charged (`dollars_per_hour`)."""

    max_running: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Maximum number of requests at the endpoint at the same time; the router treats further requests as if there were no overflow."""

    extended_fields: bool = False
    """True if the endpoint is a vLLM or SGLang server, which understands fields such as `top_k` and `structured_outputs`. Otherwise requests
    with such fields, or with `logit_bias`, do not overflow, because OpenAI's servers would ignore or refuse them."""

    excluded_tenants: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Tenants whose prompts must not leave the cluster."""

    first_byte_seconds: WaitSeconds = 30.0
    """Maximum wait in seconds for the beginning of the endpoint's answer; after it, the request counts as failed at the endpoint. Models that
    reason take tens of seconds."""

    silence_seconds: WaitSeconds = 30.0
    """Maximum time in seconds without a byte within the endpoint's answer; after it, the answer is broken off."""

    def __post_init__(self) -> None:
        refuse_credentials("url", self.url, "api_key_file")
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is invalid
            usable = False
        printable = all(" " < character < "\x7f" for character in self.url)
        if not usable or not printable or parts.query or parts.fragment:
            raise ValueError(f"url: {self.url!r} must be http://host:port or https://host:port")
        if self.api_key_file and not self.insecure:
            refuse_plain_key("url", self.url, "api_key_file", "insecure")
        if not self.dollars_per_million_prompt_tokens and not self.dollars_per_million_answer_tokens:
            raise ValueError(
                "dollars_per_million_answer_tokens: one of the two prices must be above 0, or dollars_per_hour would limit nothing"
            )
