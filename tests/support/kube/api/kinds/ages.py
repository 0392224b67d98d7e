"""Times and ages in the forms in which Kubernetes writes them."""

from datetime import UTC, datetime

WIDTHS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now() -> str:
    return rfc3339(datetime.now(UTC))


def age(since: str | None) -> str:
    """Return an age roughly as `kubectl get` shows it: `45s`, `5m`, `3h`, `2d`."""
    if since is None:
        return "<unknown>"
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()))
    for sign, width in WIDTHS:
        if seconds >= 2 * width or width == 1:
            return f"{seconds // width}{sign}"
    raise AssertionError
