"""Transfer queue: transfers that the hierarchy has decided and that the transfer executor has not begun yet."""

from itertools import count

from kvstore.hierarchy.transfers import TierTransfer


class TransferQueue:
    """Holds the transfers in the order in which they were decided.

    Callers that make a transfer put at most `batch_blocks` blocks into it. A transfer thus copies at most `batch_bytes`
    bytes, or a single block that is larger.
    """

    def __init__(self, batch_bytes: int):
        self._batch_bytes = batch_bytes
        self._numbers = count(1)
        self._commands: list[TierTransfer] = []

    def new_id(self) -> int:
        """Return a new id for a promotion, demotion or confirmation."""
        return next(self._numbers)

    def batch_blocks(self, block_bytes: int) -> int:
        """Return the largest number of blocks of this size in one transfer; at least 1."""
        return max(1, self._batch_bytes // block_bytes)

    def put(self, transfer: TierTransfer) -> None:
        self._commands.append(transfer)

    def take_all(self) -> list[TierTransfer]:
        """Return the queued transfers and empty the queue."""
        commands, self._commands = self._commands, []
        return commands
