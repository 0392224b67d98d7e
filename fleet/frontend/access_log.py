"""Access log of a router process: one line for each request that ended or was refused.

The setting `access_log` turns it on. Lines name requests, models and tenants, and never contain prompts, answers or keys.
"""

import logging
from collections.abc import Sequence

from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.requests import Finish, KvPhase, Usage
from fleet.core.roles import Phase

log = logging.getLogger("fleet.access")

LONGEST_NAME = 128
"""Most characters of a name in a line; clients choose the names, and also request ids that are refused."""


class AccessEntry:
    """The line of one request, which is written at its end."""

    def __init__(self, request_id: RequestId, model: str, tenant: str) -> None:
        self.request_id = request_id
        self.model = model
        self.tenant = tenant

    def write(
        self,
        outcome: Finish | Reason,
        *,
        usage: Usage | None,
        kv: Sequence[KvPhase],
        first_seconds: float | None,
        seconds: float,
    ) -> None:
        """Write the line.

        Args:
            outcome: How the request ended.
            usage: Its tokens; None if it was not admitted.
            kv: KV reports of its phases, which tell how it was placed.
            first_seconds: From its arrival to its first token; None if it had none.
            seconds: From its arrival to its end.
        """
        fields: dict[str, object] = {"request": quoted(self.request_id), "model": quoted(self.model)}
        if self.tenant:
            fields["tenant"] = quoted(self.tenant)
        fields["outcome"] = outcome.value
        if kv:
            fields["placement"] = "aggregated" if kv[0].phase is Phase.AGGREGATED else "disaggregated"
        if usage is not None:
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "answer_tokens": usage.completion_tokens,
            }
        if first_seconds is not None:
            fields["ttft_ms"] = f"{first_seconds * 1000:.1f}"
        fields["ms"] = f"{seconds * 1000:.1f}"
        log.info("request refused" if usage is None else "request ended", extra=fields)


def write_relayed(
    request_id: RequestId, tenant: str, reason: Reason | None, answer_tokens: int, seconds: float
) -> None:
    """Write the line of a request to an external server; `answer_tokens` is approximate, and `reason` None if it was served."""
    fields: dict[str, object] = {"request": request_id}
    if tenant:
        fields["tenant"] = quoted(tenant)
    fields |= {"outcome": "relayed" if reason is None else reason.value, "answer_tokens": answer_tokens}
    log.info("relayed request ended", extra=fields | {"ms": f"{seconds * 1000:.1f}"})


def quoted(name: str) -> str:
    """Return a client's name in a form that can neither end the line nor look like another field."""
    short = name[:LONGEST_NAME]
    return short if short.isascii() and short.isprintable() and not {" ", "="} & set(short) else repr(short)
