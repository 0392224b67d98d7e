"""Rate limit headers, as OpenAI's clients know them."""

from fleet.core.requests import RateLimitStatus, RemainingLimit


def rate_limit_headers(allowance: RateLimitStatus | None) -> tuple[tuple[str, str], ...]:
    """Return the headers of an answer; none for a tenant without limits."""
    headers: list[tuple[str, str]] = []
    for name in () if allowance is None else ("requests", "tokens"):
        bucket: RemainingLimit | None = getattr(allowance, name)
        if bucket is not None:
            headers += [
                (f"x-ratelimit-limit-{name}", str(bucket.limit)),
                (f"x-ratelimit-remaining-{name}", str(bucket.remaining)),
                (f"x-ratelimit-reset-{name}", f"{bucket.full_in_seconds:.3f}s"),
            ]
    return tuple(headers)
