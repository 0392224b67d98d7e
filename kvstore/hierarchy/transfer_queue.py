"""Transfer queue: transfers that the hierarchy has decided and nobody has begun."""

from itertools import count

from kvstore.hierarchy.transfers import TierTransfer


class TransferQueue:
    """Transfers in the order of their decision; each moves `batch_bytes`, or one block if that is larger."""

    def __init__(self, batch_bytes: int):
        self._batch_bytes = batch_bytes
        self._numbers = count(1)
        self._commands: list[TierTransfer] = []

    def new_id(self) -> int:
        """Return a new id for a promotion, demotion or confirmation."""
        return next(self._numbers)

    def batch_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of that size one transfer moves."""
        return max(1, self._batch_bytes // block_bytes)

    def put(self, transfer: TierTransfer) -> None:
        self._commands.append(transfer)

    def take_all(self) -> list[TierTransfer]:
        """Return the queued transfers; each is handed out once."""
        commands, self._commands = self._commands, []
        return commands
