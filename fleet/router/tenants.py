"""Tenants: API keys, and rate limits with two token buckets for each tenant.

Rules:

1. If no tenant has a key, the router trusts the tenant's name in a request, because then only trusted clients are expected on the network.
   If any tenant has a key, each request has to prove its tenant by a key, and must not name another tenant.
2. A tenant has one token bucket for requests and one for tokens. Each fills at a constant rate, up to the limit for one minute. A request
   is admitted if the level of each bucket is at least one. On admission it takes one request and the tokens of its prompt, and at its end
   the tokens of its answer. So the level may fall below zero; then no request is admitted until the level has risen to one again. A limit
   that is not set has no bucket.
3. Routers can share buckets through Redis. Several times a second each router reports what was taken from its buckets (`taken`) and gets
   the common levels (`settle`). It also sends its own levels (`before`), in case Redis has lost the common ones. Between two reports, each
   router counts by itself. So in this time the routers together may admit more than the limit.
4. Routers that are peers (`fleet.peers`) each keep buckets for the whole cluster: each subtracts what was taken at its peers
   (`took_elsewhere`). Until all peers have confirmed what a router has reported, that router admits at most an equal share of what is left,
   or one request if the share is smaller (`is_unsure`). N routers together admit at most N - 1 requests too many. The level of the bucket
   is then below zero, so these requests are made up for later.
5. A request that needs work before its admission first asks whether it would be admitted (`expected`), so that no work is done for a
   tenant over its limit. Examples are fetching images, and finding and replaying the tokens of an answer that is resumed. The question
   takes nothing from the buckets. But until the work is done, the request counts as expected when other requests ask. The question is
   decided by the buckets of this router alone; the later admission follows rules 2 to 4.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected, invalid
from fleet.core.requests import RateLimitStatus, RemainingLimit

MINUTE_SECONDS = 60
# Maximum number of times that one request waits until the peers have confirmed this router's usage (rule 4). After each wait, this router may
# admit at least its equal share of what is left of the tenant's limit.
ROUNDS = 100
# Maximum retry hint, in seconds, for a request that would be admitted if no other requests were expected (rule 5). The hint is short,
# because an expected request takes nothing from the buckets if its preparation fails.
RETRY_EXPECTED_SECONDS = 1.0

PerMinute = Annotated[float, Meta(ge=0, le=1e12)]
Sha256Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tenant."""

    api_key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each API key of the tenant, in hex (``printf %s KEY | sha256sum``), so that the file holds no secret."""

    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    """While requests wait in the router, each tenant gets a share of the computed prompt tokens in proportion to its weight."""

    requests_per_minute: PerMinute = 0.0
    """Maximum number of requests per minute on average, at least 1. After a minute's pause, so many are admitted at once. 0: no limit."""

    tokens_per_minute: PerMinute = 0.0
    """Maximum number of tokens of prompts and answers per minute on average, at least 1. After a pause, so many may be used at once, and the
    last request that is admitted may exceed the limit (rule 2). 0: no limit."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def __post_init__(self) -> None:
        for field, limit in (("requests", self.requests_per_minute), ("tokens", self.tokens_per_minute)):
            if 0 < limit < 1:
                raise ValueError(f"{field}_per_minute: {limit:g} would never let anything in; 0 means no limit")


class TokenBucket:
    """A token bucket that refills at a constant rate. It holds at most the amount for one minute."""

    def __init__(self, per_minute: float, now: Nanos) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def level(self, now: Nanos) -> float:
        """Return the present level of the bucket. It is negative if more was taken than the bucket contained."""
        gained = max(0, now - self._at) * self.per_minute / (MINUTE_SECONDS * SECOND)
        return min(self.per_minute, self._level + gained)

    def take(self, amount: float, now: Nanos) -> None:
        self.settle(self.level(now) - amount, now)

    def settle(self, level: float, now: Nanos) -> None:
        self._level, self._at = min(self.per_minute, level), max(self._at, now)

    def seconds_until(self, level: float, now: Nanos) -> float:
        return max(0.0, level - self.level(now)) * MINUTE_SECONDS / self.per_minute


class TenantUsageDelta(Struct, frozen=True, kw_only=True):
    """The requests and tokens that were taken from a tenant's buckets at one router: since its last report, or since its start."""

    requests: float
    tokens: float


class TenantUsage(Struct, kw_only=True):
    """The usage of a tenant on this router since the start of the router, for accounting."""

    requests: int = 0  # number of requests that were admitted
    prompt_tokens: int = 0
    answer_tokens: int = 0


class BucketLevels(Struct, frozen=True, kw_only=True):
    """The levels of a tenant's two buckets; 0 if there is no such bucket."""

    requests: float
    tokens: float


SettleWithPeers = Callable[[], Awaitable[bool]]
"""A function that waits until all peers have confirmed what was taken at this router. It returns False if a peer did not answer in time."""


class _TenantLimits:
    def __init__(self, settings: TenantSettings, now: Nanos) -> None:
        self.requests = TokenBucket(settings.requests_per_minute, now) if settings.requests_per_minute else None
        self.tokens = TokenBucket(settings.tokens_per_minute, now) if settings.tokens_per_minute else None
        # Number of requests that are being prepared for their admission, such as by fetching images (rule 5).
        self.expected = 0
        self.taken_requests = 0.0
        self.taken_tokens = 0.0
        # The total that was taken at this router since the start, which the peers must learn. It never falls.
        self.total_taken = TenantUsageDelta(requests=0.0, tokens=0.0)
        self.confirmed = self.total_taken  # the part of `total_taken` that all peers have confirmed

    @property
    def unconfirmed_requests(self) -> float:
        return self.total_taken.requests - self.confirmed.requests

    @property
    def unconfirmed_tokens(self) -> float:
        return self.total_taken.tokens - self.confirmed.tokens


class Tenants:
    """Checks the API keys and the rate limits of the tenants that the settings name. Other tenants have neither keys nor limits."""

    def __init__(self, settings: Mapping[str, TenantSettings], now: Nanos) -> None:
        """Start with full token buckets.

        Raises:
            ConfigurationRefused: Two tenants have the same key.
        """
        self._by_key: dict[str, str] = {}
        for name, tenant in settings.items():
            for key in tenant.api_key_sha256:
                if (other := self._by_key.setdefault(key, name)) != name:
                    raise ConfigurationRefused(f"tenants.{name}.api_key_sha256: {key[:8]}… is a key of {other!r} too")
        self.exist = bool(settings)
        """False if the settings name no tenants. Then there are neither keys nor limits, so frontends need not call this object for each request."""

        self.settle_with_others: SettleWithPeers | None = None
        """A function that waits until the peers have confirmed the usage at this router (rule 4). The component that sends
        the usage to the peers sets it. None: there are no peers."""

        self.on_taken: Callable[[], None] | None = None
        """A function that is called after something was taken from a bucket at this router. It must not block. None: there are no peers."""

        self.others = 0
        """The number of peer routers to which the usage at this router is sent, without those that do not answer."""

        self._usage = {name: TenantUsage() for name in settings}
        self._limited = {name: _TenantLimits(tenant, now) for name, tenant in settings.items() if tenant.is_limited}

    @property
    def by_key(self) -> bool:
        """True if requests have to prove their tenant by an API key."""
        return bool(self._by_key)

    def tenant(self, authorization: str, named: str) -> str:
        """Return the tenant of a request (rule 1).

        Args:
            authorization: The value of the header `authorization`, ``Bearer KEY``; empty: there is no such header.
            named: The tenant that the request names; empty: it names none.

        Raises:
            RequestRejected: UNAUTHENTICATED if there is no known key; INVALID_ARGUMENT if the request names another tenant than that of its
            key.
        """
        if not self._by_key:
            return named
        scheme, _, key = authorization.partition(" ")
        # the original bytes of the header, because frontends decode headers as Latin-1
        sent = key.strip(" \t").encode("latin-1", "replace")
        known = self._by_key.get(sha256(sent).hexdigest())
        if scheme.lower() != "bearer" or known is None:
            missing = "is missing" if not authorization else "has no known key"
            raise RequestRejected(
                Reason.UNAUTHENTICATED,
                f"authorization: {missing}; send 'Bearer' and your API key",
                field="authorization",
            )
        if named not in ("", known):
            raise invalid("tenant", "is not the tenant of the API key; leave it out")
        return known

    def check_count(self, tenant: str, count: int, field: str) -> None:
        """Check that a client's request, which becomes `count` requests, does not need more of them than a full bucket holds.

        Args:
            tenant: Name of the tenant.
            count: Number of requests that the client's request becomes.
            field: The client's field that causes this number, for the error.

        Raises:
            RequestRejected: INVALID_ARGUMENT. The client's request would use up the limit and then fail, and so would a retry.
        """
        limited = self._limited.get(tenant)
        if limited is not None and limited.requests is not None and count > limited.requests.per_minute:
            raise invalid(
                field,
                f"makes {count} requests, and this tenant has {limited.requests.per_minute:g} a minute; send fewer at a time",
            )

    def admit(self, tenant: str, prompt_tokens: int, now: Nanos) -> RateLimitStatus | None:
        """Admit a request, and take one request and the tokens of its prompt from the tenant's buckets.

        Return what is left in the buckets; None for a tenant without limits.

        Raises:
            RequestRejected: RATE_LIMITED, with what is left and the time after which a request can be admitted.
        """
        limited = self._limited.get(tenant)
        if limited is not None:
            _check(limited, now)
        if (usage := self._usage.get(tenant)) is not None:
            usage.requests += 1
            usage.prompt_tokens += prompt_tokens
        if limited is None:
            return None
        self._take(limited, 1, prompt_tokens, now)
        return _status(limited, now)

    @contextmanager
    def expected(self, tenant: str, now: Nanos) -> Iterator[None]:
        """Check that `admit` would admit this request after all expected ones, and count it as expected while the context is open.

        Nothing is taken (rule 5).

        Raises:
            RequestRejected: RATE_LIMITED. The retry hint is the time after which a request can be admitted. It is at most
            `RETRY_EXPECTED_SECONDS` if the request would be admitted without the expected requests, because their preparation may fail at
            any time.
        """
        limited = self._limited.get(tenant)
        if limited is None:
            yield
            return
        _check(limited, now)
        if limited.requests is not None:
            _check_expected(limited, limited.requests, now)
        limited.expected += 1
        try:
            yield
        finally:
            limited.expected -= 1

    def used(self, tenant: str, answer_tokens: int, now: Nanos, image_tokens: int = 0) -> None:
        """Take the tokens of an answer and of images from the tenant's buckets. The answer may have ended in any way.

        Args:
            tenant: Name of the tenant.
            answer_tokens: Number of tokens of the answer.
            now: The present instant.
            image_tokens: Number of tokens that images added to the prompt, which is known only after the request was admitted.
        """
        if (usage := self._usage.get(tenant)) is not None:
            usage.answer_tokens += answer_tokens
            usage.prompt_tokens += image_tokens
        if (limited := self._limited.get(tenant)) is not None:
            self._take(limited, 0, answer_tokens + image_tokens, now)

    def usage(self) -> Mapping[str, TenantUsage]:
        """Return the usage of each tenant that the settings name. The returned objects are not copies, so they keep changing."""
        return self._usage

    def taken(self) -> dict[str, TenantUsageDelta]:
        """Return, for each tenant with limits, what was taken at this router since the last call. Tenants that took nothing are left out."""
        taken = {}
        for name, limited in self._limited.items():
            if limited.taken_requests or limited.taken_tokens:
                taken[name] = TenantUsageDelta(requests=limited.taken_requests, tokens=limited.taken_tokens)
                limited.taken_requests = limited.taken_tokens = 0.0
        return taken

    def settle(self, tenant: str, requests: float, tokens: float, now: Nanos) -> None:
        """Set a tenant's buckets to the common levels of all routers, minus what was taken at this router since the last call of `taken`."""
        limited = self._limited[tenant]
        if limited.requests is not None:
            limited.requests.settle(requests - limited.taken_requests, now)
        if limited.tokens is not None:
            limited.tokens.settle(tokens - limited.taken_tokens, now)

    def before(self, tenant: str, now: Nanos) -> tuple[float, float]:
        """Return the levels that a tenant's two buckets would have if nothing had been taken since the last call of `taken`.

        The level is 0 if there is no such bucket.
        """
        limited = self._limited[tenant]
        return (
            0.0 if limited.requests is None else limited.requests.level(now) + limited.taken_requests,
            0.0 if limited.tokens is None else limited.tokens.level(now) + limited.taken_tokens,
        )

    def is_unsure(self, tenant: str, prompt_tokens: int, now: Nanos) -> bool:
        """Return whether all peers should confirm what was taken at this router before this request is admitted (rule 4)."""
        limited = self._limited.get(tenant) if self.others else None
        if limited is None:
            return False
        routers = 1 + self.others
        return _exceeds_share(limited.requests, limited.unconfirmed_requests, 1, routers, now) or _exceeds_share(
            limited.tokens, limited.unconfirmed_tokens, prompt_tokens, routers, now
        )

    def unconfirmed_totals(self) -> dict[str, TenantUsageDelta]:
        """Return the requests and tokens that tenants have taken at this router, for each tenant whose totals not all peers know.

        The caller sends these totals to the peers, and passes them to `confirm` when all peers have confirmed them.
        """
        return {
            name: limited.total_taken
            for name, limited in self._limited.items()
            if limited.total_taken != limited.confirmed
        }

    def confirm(self, totals: Mapping[str, TenantUsageDelta]) -> None:
        """Record that all peers have confirmed these totals, which `unconfirmed_totals` has returned.

        The calls may come in any order, and repeatedly.
        """
        for name, taken in totals.items():
            limited = self._limited[name]
            limited.confirmed = TenantUsageDelta(
                requests=max(limited.confirmed.requests, taken.requests),
                tokens=max(limited.confirmed.tokens, taken.tokens),
            )

    def took_elsewhere(self, tenant: str, taken: TenantUsageDelta, now: Nanos) -> None:
        """Subtract from a tenant's buckets what the tenant took on a peer router."""
        if (limited := self._limited.get(tenant)) is not None:
            if limited.requests is not None:
                limited.requests.take(taken.requests, now)
            if limited.tokens is not None:
                limited.tokens.take(taken.tokens, now)

    def left(self, now: Nanos) -> dict[str, BucketLevels]:
        """Return the bucket levels of each tenant that has a bucket which is not full."""
        return {
            name: BucketLevels(requests=_level(limited.requests, now), tokens=_level(limited.tokens, now))
            for name, limited in self._limited.items()
            if _is_used(limited.requests, now) or _is_used(limited.tokens, now)
        }

    def lower(self, tenant: str, left: BucketLevels, now: Nanos) -> None:
        """Lower the levels of a tenant's buckets to those of a peer where the peer's are lower."""
        if (limited := self._limited.get(tenant)) is not None:
            for bucket, level in ((limited.requests, left.requests), (limited.tokens, left.tokens)):
                if bucket is not None and level < bucket.level(now):
                    bucket.settle(level, now)

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return the limits of each tenant that has any, as requests and tokens per minute; 0: no such limit."""
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
            limited.total_taken = TenantUsageDelta(
                requests=limited.total_taken.requests + requests, tokens=limited.total_taken.tokens + tokens
            )
            self.on_taken()


async def admit_with_peers(tenants: Tenants, tenant: str, prompt_tokens: int, clock: Clock) -> RateLimitStatus | None:
    """Admit a request like `Tenants.admit`. If the tenant is near a limit, first wait for the peer routers (rule 4).

    Return what is left in the buckets; None for a tenant without limits.

    Raises:
        RequestRejected: The tenant has used up its limit.
    """
    for _ in range(ROUNDS):
        settle = tenants.settle_with_others
        if settle is None or not tenants.is_unsure(tenant, prompt_tokens, clock.now()):
            break
        if not await settle():
            break  # a peer did not answer, so this router decides by its own count
    return tenants.admit(tenant, prompt_tokens, clock.now())


async def await_settle(settle: SettleWithPeers) -> bool:
    """Await the result of `settle` in a coroutine, because callers make a task of it, and not every awaitable can become a task."""
    return await settle()


def _exceeds_share(bucket: TokenBucket | None, unconfirmed: float, more: float, routers: int, now: Nanos) -> bool:
    """Return whether a request would exceed the router's equal share of what is left. The router then has to ask its peers first.

    Return False if the peers have confirmed everything, or if the request is rejected in any case.
    """
    if bucket is None or not unconfirmed or (level := bucket.level(now)) < 1:
        return False  # nothing is unconfirmed, there is no such limit, or the request is rejected, because less than one is left
    return unconfirmed + more > max(1.0, (level + unconfirmed) / routers)


def _level(bucket: TokenBucket | None, now: Nanos) -> float:
    return 0.0 if bucket is None else bucket.level(now)


def _is_used(bucket: TokenBucket | None, now: Nanos) -> bool:
    return bucket is not None and bucket.level(now) < bucket.per_minute


def _check(limited: _TenantLimits, now: Nanos) -> None:
    """Refuse a request unless the level of each bucket is at least one (rule 2)."""
    for bucket, what in ((limited.requests, "requests"), (limited.tokens, "tokens")):
        if bucket is not None and (seconds := bucket.seconds_until(1, now)):
            raise RequestRejected(
                Reason.RATE_LIMITED,
                f"this tenant has used up its {bucket.per_minute:g} {what} a minute; retry in {seconds:.1f} s",
                retry_after_ms=_milliseconds(seconds),
                allowance=_status(limited, now),
            )


def _check_expected(limited: _TenantLimits, requests: TokenBucket, now: Nanos) -> None:
    """Refuse a request unless the bucket holds enough for all expected requests and for this one (rule 5)."""
    seconds = min(RETRY_EXPECTED_SECONDS, requests.seconds_until(1 + limited.expected, now))
    if seconds == 0:
        return
    raise RequestRejected(
        Reason.RATE_LIMITED,
        f"{limited.expected} of this tenant's requests are being prepared (their images are fetched, or answers are resumed), and its limit"
        f" of {requests.per_minute:g} requests a minute leaves no room for more; retry in {seconds:.1f} s",
        retry_after_ms=_milliseconds(seconds),
        allowance=_status(limited, now),
    )


def _milliseconds(seconds: float) -> int:
    return max(1, ceil(seconds * SECOND / MILLISECOND))


def _status(limited: _TenantLimits, now: Nanos) -> RateLimitStatus:
    return RateLimitStatus(requests=_remaining(limited.requests, now), tokens=_remaining(limited.tokens, now))


def _remaining(bucket: TokenBucket | None, now: Nanos) -> RemainingLimit | None:
    if bucket is None:
        return None
    return RemainingLimit(
        limit=int(bucket.per_minute),
        remaining=max(0, int(bucket.level(now))),
        full_in_seconds=bucket.seconds_until(bucket.per_minute, now),
    )
