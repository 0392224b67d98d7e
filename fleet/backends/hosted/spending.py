"""Spending limit of a hosted endpoint: computes from the charges of the last hour whether one more request fits.

This module does no I/O.

Rules:

1. A charge belongs to the minute in which its request began. A request is admitted only if its estimate, together with
   the charges of the present minute and of the 60 minutes before, stays within the limit. So the charges of any 60
   consecutive minutes stay within the limit, too.
2. The estimate is the cost of the prompt and of the longest answer that the request allows (`_Offer.estimate` in
   `fleet.backends.hosted.overflow`). A prompt that was not tokenized counts as one token for each byte of the body. The
   estimate is charged before the request is sent. When the usage is known, the difference to the real cost is
   subtracted from the charge of the same minute. If the usage never becomes known, the estimate remains. So even if the
   process is killed, the charges are never below the money that was spent.
3. If the usage costs more than the estimate, because the endpoint counts the prompt differently, the difference is
   charged too. Only in this case can the charges of an hour exceed the limit. No new requests are then admitted until
   enough charges are older than an hour.
4. If the wall clock goes back, charges of later minutes count as charges of the present minute. So they are neither
   lost nor kept for longer than an hour. But it is not known any more in which minute their requests began. So if such a
   request costs less than its estimate, the difference is not subtracted, and stays charged for up to an hour.
"""

from collections.abc import Mapping
from math import ceil

from msgspec import Struct

WINDOW_MINUTES = 60
MINUTE_SECONDS = 60
NANODOLLARS = 10**9

Charges = dict[int, int]
"""Charged nanodollars, by the minute since 1970 in which their requests began."""


class TokenPrices(Struct, frozen=True, kw_only=True):
    """Prices of a hosted endpoint, in dollars per million tokens of the prompt and of the answer."""

    prompt: float
    answer: float

    def cost(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Return the price of a request in nanodollars, rounded up."""
        return ceil(1000 * (self.prompt * prompt_tokens + self.answer * answer_tokens))


def minute_of(unix_seconds: float) -> int:
    return int(unix_seconds // MINUTE_SECONDS)


def pruned(charges: Mapping[int, int], minute: int) -> Charges:
    """Return the charges that still count against the limit in the present minute `minute` (rules 1 and 4)."""
    kept: Charges = {}
    for began, amount in charges.items():
        if began >= minute - WINDOW_MINUTES and amount > 0:
            place = min(began, minute)
            kept[place] = kept.get(place, 0) + amount
    return kept


def reserve(charges: Charges, estimate: int, limit: int, minute: int) -> bool:
    """Add an estimate to the charges of the present minute if it fits (rule 1); return True if it was added."""
    if sum(charges.values()) + estimate > limit:
        return False
    charges[minute] = charges.get(minute, 0) + estimate
    return True


def settle(charges: Charges, began: int, estimate: int, cost: int, minute: int) -> None:
    """Replace the estimate of a request that began in the minute `began` by its real cost (rules 2 and 3)."""
    place = began if began in charges else minute
    if place != began and cost <= estimate:
        return  # the charge does not count any more, or was moved to another minute (rule 4), so it is not corrected
    charges[place] = max(0, charges.get(place, 0) + cost - estimate)
