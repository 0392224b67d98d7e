"""Who asks, and how much each may have: API keys, and two token buckets a tenant.

Rules:

1. Where no tenant has a key, a router believes the tenant that a request names: the network is closed. Where one has, a
   request proves its tenant by a key, and must not name another.
2. A tenant has a bucket of requests and one of tokens, each filled evenly up to a minute's worth. A request is let in
   when both hold at least one; it takes one request and its prompt at once, the tokens of its answer when it has ended. A
   bucket may be overdrawn so, and lets nobody in until it is filled again. No limit: no bucket.
3. Several routers share buckets by telling each other what they took (`taken`) and hearing what is left (`settle`), some
   times a second, with what each believes (`before`) for when the place where they meet has forgotten. In between each counts for itself, so together they let in at most what fits into that time too much.
4. Routers that tell each other directly (`fleet.peers.routers`) each count what all of them take: what another one took comes off here
   (`took_elsewhere`). Before the others have confirmed that they heard of it, a router lets in at most an equal share of what is left
   (`is_unsure`), and one request where less is left: N routers together let in at most N - 1 requests too many, which the bucket
   then owes.
"""

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected, invalid
from fleet.core.requests import RateLimitStatus, RemainingLimit

MINUTE_SECONDS = 60

PerMinute = Annotated[float, Meta(ge=0, le=1e12)]
Sha256Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What operators may say of one tenant."""

    api_key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each key it may show, in hex (``printf %s KEY | sha256sum``), so that the file holds no secret."""

    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    """Its share of the prompt tokens computed while requests wait, beside the others' weights."""

    requests_per_minute: PerMinute = 0.0
    """Requests let in, 1 or more; 0: no limit."""

    tokens_per_minute: PerMinute = 0.0
    """Tokens of prompts and answers, 1 or more; 0: no limit."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def __post_init__(self) -> None:
        for field, limit in (("requests", self.requests_per_minute), ("tokens", self.tokens_per_minute)):
            if 0 < limit < 1:
                raise ValueError(f"{field}_per_minute: {limit:g} would never let anything in; 0 means no limit")


class TokenBucket:
    """What may be taken, filled evenly to a minute's worth."""

    def __init__(self, per_minute: float, now: Nanos) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def level(self, now: Nanos) -> float:
        """What is in it; below zero when more was taken than there was."""
        gained = max(0, now - self._at) * self.per_minute / (MINUTE_SECONDS * SECOND)
        return min(self.per_minute, self._level + gained)

    def take(self, amount: float, now: Nanos) -> None:
        self.settle(self.level(now) - amount, now)

    def settle(self, level: float, now: Nanos) -> None:
        self._level, self._at = min(self.per_minute, level), max(self._at, now)

    def seconds_until(self, level: float, now: Nanos) -> float:
        return max(0.0, level - self.level(now)) * MINUTE_SECONDS / self.per_minute


class TenantUsageDelta(Struct, frozen=True, kw_only=True):
    """What a tenant took here since this was asked last."""

    requests: float
    tokens: float


class TenantUsage(Struct, kw_only=True):
    """What a tenant has had here since the router began, for who keeps books."""

    requests: int = 0  # that were let in
    prompt_tokens: int = 0
    answer_tokens: int = 0


class BucketLevels(Struct, frozen=True, kw_only=True):
    """The content of a tenant's buckets; 0 where there is none of this kind."""

    requests: float
    tokens: float


SettleWithPeers = Callable[[], Awaitable[bool]]
"""Waits until the other routers have heard what was taken here; False where one of them did not answer in time."""


class _TenantLimits:
    def __init__(self, settings: TenantSettings, now: Nanos) -> None:
        self.requests = TokenBucket(settings.requests_per_minute, now) if settings.requests_per_minute else None
        self.tokens = TokenBucket(settings.tokens_per_minute, now) if settings.tokens_per_minute else None
        self.taken_requests = 0.0
        self.taken_tokens = 0.0
        self.told = TenantUsageDelta(
            requests=0.0, tokens=0.0
        )  # all that was taken here for others to hear of; it only grows
        self.heard = self.told  # as much of it as all other routers have confirmed that they heard of

    @property
    def unheard_requests(self) -> float:
        return self.told.requests - self.heard.requests

    @property
    def unheard_tokens(self) -> float:
        return self.told.tokens - self.heard.tokens


class Tenants:
    """All tenants that the settings name; others have neither keys nor limits."""

    def __init__(self, settings: Mapping[str, TenantSettings], now: Nanos) -> None:
        """All buckets are full.

        Raises:
            ConfigurationRefused: Two tenants have the same key.
        """
        self._by_key: dict[str, str] = {}
        for name, tenant in settings.items():
            for key in tenant.api_key_sha256:
                if (other := self._by_key.setdefault(key, name)) != name:
                    raise ConfigurationRefused(f"tenants.{name}.api_key_sha256: {key[:8]}… is a key of {other!r} too")
        self.settle_with_others: SettleWithPeers | None = None
        """Set by whoever tells other routers directly what is taken here (rule 4)."""

        self.on_taken: Callable[[], None] | None = None
        """Called when something was taken from a bucket here; must not block."""

        self.others = 0
        """Routers that are told directly."""

        self._usage = {name: TenantUsage() for name in settings}
        self._limited = {name: _TenantLimits(tenant, now) for name, tenant in settings.items() if tenant.is_limited}

    @property
    def by_key(self) -> bool:
        """Whether requests prove their tenant by a key."""
        return bool(self._by_key)

    def tenant(self, authorization: str, named: str) -> str:
        """Whose request this is (rule 1).

        Args:
            authorization: The header of that name, ``Bearer KEY``; empty: there is none.
            named: The tenant that the request itself names; empty: none.

        Raises:
            Refused: UNAUTHENTICATED without a known key; INVALID_ARGUMENT where it names another tenant than its key's.
        """
        if not self._by_key:
            return named
        scheme, _, key = authorization.partition(" ")
        sent = key.strip(" \t").encode("latin-1", "replace")  # the bytes of the header, which fronts read as Latin-1
        known = self._by_key.get(sha256(sent).hexdigest())
        if scheme.lower() != "bearer" or known is None:
            missing = "is missing" if not authorization else "has no key that is known here"
            raise RequestRejected(
                Reason.UNAUTHENTICATED,
                f"authorization: {missing}; send 'Bearer' and your API key",
                field="authorization",
            )
        if named not in ("", known):
            raise invalid("tenant", "is not the one of the API key; leave it out")
        return known

    def admit(self, tenant: str, prompt_tokens: int, now: Nanos) -> RateLimitStatus | None:
        """Let a request in; returns what is left, None for a tenant without limits.

        Raises:
            Refused: RATE_LIMITED, with the time after which the next request is let in.
        """
        limited = self._limited.get(tenant)
        if limited is not None:
            _check(limited.requests, "requests", now)
            _check(limited.tokens, "tokens", now)
        if (usage := self._usage.get(tenant)) is not None:
            usage.requests += 1
            usage.prompt_tokens += prompt_tokens
        if limited is None:
            return None
        self._take(limited, 1, prompt_tokens, now)
        return RateLimitStatus(requests=_remaining(limited.requests, now), tokens=_remaining(limited.tokens, now))

    def used(self, tenant: str, answer_tokens: int, now: Nanos) -> None:
        """An answer has ended, however it did."""
        if (usage := self._usage.get(tenant)) is not None:
            usage.answer_tokens += answer_tokens
        if (limited := self._limited.get(tenant)) is not None:
            self._take(limited, 0, answer_tokens, now)

    def usage(self) -> Mapping[str, TenantUsage]:
        """Of each tenant that the settings name; it goes on counting."""
        return self._usage

    def taken(self) -> dict[str, TenantUsageDelta]:
        """What was taken here since the last call, of tenants with limits that took anything."""
        taken = {}
        for name, limited in self._limited.items():
            if limited.taken_requests or limited.taken_tokens:
                taken[name] = TenantUsageDelta(requests=limited.taken_requests, tokens=limited.taken_tokens)
                limited.taken_requests = limited.taken_tokens = 0.0
        return taken

    def settle(self, tenant: str, requests: float, tokens: float, now: Nanos) -> None:
        """What is left of a tenant's buckets by everybody's count; what was taken here since `taken` comes off."""
        limited = self._limited[tenant]
        if limited.requests is not None:
            limited.requests.settle(requests - limited.taken_requests, now)
        if limited.tokens is not None:
            limited.tokens.settle(tokens - limited.taken_tokens, now)

    def before(self, tenant: str, now: Nanos) -> tuple[float, float]:
        """Requests and tokens that would be in a tenant's buckets but for what was taken since `taken`; 0: no such bucket."""
        limited = self._limited[tenant]
        return (
            0.0 if limited.requests is None else limited.requests.level(now) + limited.taken_requests,
            0.0 if limited.tokens is None else limited.tokens.level(now) + limited.taken_tokens,
        )

    def is_unsure(self, tenant: str, prompt_tokens: int, now: Nanos) -> bool:
        """Return whether the other routers should hear what was taken here before this request is let in (rule 4)."""
        limited = self._limited.get(tenant) if self.others else None
        if limited is None:
            return False
        routers = 1 + self.others
        return _exceeds_share(limited.requests, limited.unheard_requests, 1, routers, now) or _exceeds_share(
            limited.tokens, limited.unheard_tokens, prompt_tokens, routers, now
        )

    def told(self) -> dict[str, TenantUsageDelta]:
        """Return all that was taken here so far, for `confirm`; ask when others have been told of it (`taken`)."""
        return {name: limited.told for name, limited in self._limited.items() if limited.told != limited.heard}

    def confirm(self, told: Mapping[str, TenantUsageDelta]) -> None:
        """Note that all other routers have heard of so much (`told`); in whatever order, and however often, that is said."""
        for name, taken in told.items():
            limited = self._limited[name]
            limited.heard = TenantUsageDelta(
                requests=max(limited.heard.requests, taken.requests), tokens=max(limited.heard.tokens, taken.tokens)
            )

    def took_elsewhere(self, tenant: str, taken: TenantUsageDelta, now: Nanos) -> None:
        """Take what a tenant had from another router off its buckets here."""
        if (limited := self._limited.get(tenant)) is not None:
            if limited.requests is not None:
                limited.requests.take(taken.requests, now)
            if limited.tokens is not None:
                limited.tokens.take(taken.tokens, now)

    def left(self, now: Nanos) -> dict[str, BucketLevels]:
        """Return what is left in the buckets of tenants that took anything lately."""
        return {
            name: BucketLevels(requests=_level(limited.requests, now), tokens=_level(limited.tokens, now))
            for name, limited in self._limited.items()
            if _is_used(limited.requests, now) or _is_used(limited.tokens, now)
        }

    def lower(self, tenant: str, left: BucketLevels, now: Nanos) -> None:
        """Believe another router that less is left than this one knows of."""
        if (limited := self._limited.get(tenant)) is not None:
            for bucket, level in ((limited.requests, left.requests), (limited.tokens, left.tokens)):
                if bucket is not None and level < bucket.level(now):
                    bucket.settle(level, now)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Requests and tokens a minute of each tenant that has a limit; 0: none of this kind."""
        return {
            name: (
                limited.requests.per_minute if limited.requests is not None else 0.0,
                limited.tokens.per_minute if limited.tokens is not None else 0.0,
            )
            for name, limited in self._limited.items()
        }

    def _take(self, limited: _TenantLimits, requests: int, tokens: int, now: Nanos) -> None:
        if limited.requests is not None:
            limited.requests.take(requests, now)
        if limited.tokens is not None:
            limited.tokens.take(tokens, now)
        limited.taken_requests += requests
        limited.taken_tokens += tokens
        if self.on_taken is not None:
            limited.told = TenantUsageDelta(
                requests=limited.told.requests + requests, tokens=limited.told.tokens + tokens
            )
            self.on_taken()


def _exceeds_share(bucket: TokenBucket | None, unheard: float, more: float, routers: int, now: Nanos) -> bool:
    """Return whether a router should ask the others first, of `routers` that share what is left."""
    if bucket is None or not unheard or (level := bucket.level(now)) < 1:
        return False  # below one the request is refused, whatever the others took
    return unheard + more > max(1.0, (level + unheard) / routers)


def _level(bucket: TokenBucket | None, now: Nanos) -> float:
    return 0.0 if bucket is None else bucket.level(now)


def _is_used(bucket: TokenBucket | None, now: Nanos) -> bool:
    return bucket is not None and bucket.level(now) < bucket.per_minute


def _check(bucket: TokenBucket | None, what: str, now: Nanos) -> None:
    if bucket is None or (seconds := bucket.seconds_until(1, now)) == 0:
        return
    message = f"this tenant has used up its {bucket.per_minute:g} {what} a minute; retry in {seconds:.1f} s"
    raise RequestRejected(Reason.RATE_LIMITED, message, retry_after_ms=max(1, ceil(seconds * SECOND / MILLISECOND)))


def _remaining(bucket: TokenBucket | None, now: Nanos) -> RemainingLimit | None:
    if bucket is None:
        return None
    return RemainingLimit(
        limit=int(bucket.per_minute),
        remaining=max(0, int(bucket.level(now))),
        full_in_seconds=bucket.seconds_until(bucket.per_minute, now),
    )
