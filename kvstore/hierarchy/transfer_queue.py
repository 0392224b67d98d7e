"""What a node's hierarchy wants done: commands, their numbers, and how much one moves. Pure; a part of `kvstore.hierarchy.machine`."""

from itertools import count

from kvstore.hierarchy.transfers import TierTransfer


class TransferQueue:
    """Commands that wait to be performed, in order."""

    def __init__(self, batch_bytes: int):
        """None yet.

        Args:
            batch_bytes: That one of them moves, and at least a block.
        """
        self._batch_bytes = batch_bytes
        self._numbers = count(1)
        self._commands: list[TierTransfer] = []

    def number(self) -> int:
        """For the next load, copy or question; no two have the same."""
        return next(self._numbers)

    def batch_blocks(self, block_bytes: int) -> int:
        """How many blocks of so many bytes move at a time."""
        return max(1, self._batch_bytes // block_bytes)

    def give(self, transfer: TierTransfer) -> None:
        self._commands.append(transfer)

    def taken(self) -> list[TierTransfer]:
        """Each is handed out once."""
        commands, self._commands = self._commands, []
        return commands
