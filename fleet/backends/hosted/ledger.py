"""Ledgers of a spending limit: keep charges in memory for one router, or in a file for the router processes of one machine.

Rules:

1. A ledger file is read, changed and written under a lock of the kernel (flock). Each change is one write of a fixed
   size, so if the process is killed meanwhile, the file has either the old or the new content.
2. The event loop never blocks on the lock. If another process keeps the lock for `LOCK_SECONDS`, for example because it
   was stopped, no request is admitted. Settlements are then kept in memory until the lock is free.
3. If the content of a file is not a ledger, the charges of the last hour are unknown. The limit then counts as spent, so
   no request is admitted, and a warning names the file.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from fleet.backends.hosted.spending import Charges, minute_of, pruned, reserve, settle

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LOCK_SECONDS = 0.05
TRY_SECONDS = 0.005
FILE_BYTES = 4096  # size of the file in bytes; it stores the charges of 61 minutes, each in at most 32 bytes
NEAR_LIMIT = 0.5
"""Share of the spending limit. If the last known charges and the estimate are together at most this share, `has_room`
does not read the file again. It is unlikely that other processes have charged all of the rest since the last
reading."""


class SpendingLedger(Protocol):
    """Port to a ledger, which counts the charges of one hosted endpoint and checks them against the spending limit."""

    async def reserve(self, estimate: int) -> int | None:
        """Charge an estimate in nanodollars if the limit allows it.

        Return the minute of the charge (since 1970). Return None if nothing was charged: the limit leaves too little,
        or the ledger cannot be used now.
        """
        ...

    def has_room(self, estimate: int) -> bool:
        """Return True if an estimate in nanodollars would fit the limit now. The charges may be those at the last reading of a file."""
        ...

    async def settle(self, began: int, estimate: int, cost: int) -> None:
        """Replace the estimate that was charged in the minute `began` by the real cost; both in nanodollars."""
        ...

    def spent(self) -> int:
        """Return the charges of the last hour in nanodollars; if a file cannot be read now, the charges at its last reading."""
        ...


class MemoryLedger:
    """Keeps the charges of one process in memory. Implements `SpendingLedger`."""

    def __init__(self, limit: int, unix_seconds: Callable[[], float]) -> None:
        self._limit = limit
        self._unix_seconds = unix_seconds
        self._charges: Charges = {}

    async def reserve(self, estimate: int) -> int | None:
        minute = self._advanced()
        return minute if reserve(self._charges, estimate, self._limit, minute) else None

    def has_room(self, estimate: int) -> bool:
        return self.spent() + estimate <= self._limit

    async def settle(self, began: int, estimate: int, cost: int) -> None:
        minute = self._advanced()
        settle(self._charges, began, estimate, cost, minute)

    def spent(self) -> int:
        self._advanced()
        return sum(self._charges.values())

    def _advanced(self) -> int:
        minute = minute_of(self._unix_seconds())
        self._charges = pruned(self._charges, minute)
        return minute


class LedgerBusy(Exception):
    """Error: another process holds the lock of a ledger file."""


class FileLedger:
    """Keeps the charges of all router processes of a machine in one file. Implements `SpendingLedger`."""

    def __init__(self, path: Path, limit: int, unix_seconds: Callable[[], float]) -> None:
        """Open the file, and create it if it does not exist.

        Raises:
            OSError: The file cannot be used.
        """
        self._limit = limit
        self._unix_seconds = unix_seconds
        self._path = path
        # Calls of `settle` that are not in the file yet: minute, estimate and cost.
        self._owed: list[tuple[int, int, int]] = []
        self._spent = 0  # charges of the last hour at the last reading, in nanodollars
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file. If the lock is free, first write the settlements that are not in the file yet."""
        try:
            self._change(lambda _charges, _minute: None)
        except (LedgerBusy, OSError) as error:
            log.warning("spending ledger not settled", extra={"file": str(self._path), "cause": str(error)})
        os.close(self._file)

    async def reserve(self, estimate: int) -> int | None:
        def charge(charges: Charges, minute: int) -> int | None:
            return minute if reserve(charges, estimate, self._limit, minute) else None

        return await self._changed(charge)

    def has_room(self, estimate: int) -> bool:
        known = self._spent + estimate
        return known <= NEAR_LIMIT * self._limit or self.spent() + estimate <= self._limit

    async def settle(self, began: int, estimate: int, cost: int) -> None:
        self._owed.append((began, estimate, cost))
        await self._changed(lambda _charges, _minute: None)

    def spent(self) -> int:
        try:
            self._change(lambda _charges, _minute: None)
        except (LedgerBusy, OSError) as error:
            log.debug("spending ledger not read", extra={"file": str(self._path), "cause": str(error)})
        return self._spent

    async def _changed(self, change: Callable[[Charges, int], Result | None]) -> Result | None:
        """Apply a change to the charges in the file and return its result.

        Return None if the file cannot be used, or if another process holds its lock for `LOCK_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + LOCK_SECONDS
        while True:
            try:
                return self._change(change)
            except LedgerBusy:
                if loop.time() >= until:
                    log.warning("spending ledger locked by another process", extra={"file": str(self._path)})
                    return None
                await asyncio.sleep(TRY_SECONDS)
            except OSError as error:
                log.warning("spending ledger unusable", extra={"file": str(self._path), "cause": str(error)})
                return None

    def _change(self, change: Callable[[Charges, int], Result]) -> Result:
        with _locked(self._file):
            minute = minute_of(self._unix_seconds())
            charges = pruned(self._read(minute), minute)
            for began, estimate, cost in self._owed:
                settle(charges, began, estimate, cost, minute)
            result = change(charges, minute)
            content = msgspec.json.encode(charges)
            os.pwrite(self._file, content.ljust(FILE_BYTES), 0)
            self._owed.clear()
            self._spent = sum(charges.values())
            return result

    def _read(self, minute: int) -> Charges:
        content = os.pread(self._file, FILE_BYTES, 0)
        if not content:
            return {}
        try:
            return msgspec.json.decode(content, type=Charges)
        except (msgspec.DecodeError, UnicodeDecodeError):
            log.warning("spending ledger unreadable, counted as spent", extra={"file": str(self._path)})
            return {minute: self._limit}


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Lock a file until the end of the `with` block, without waiting for the lock.

    Raises:
        LedgerBusy: Another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LedgerBusy("another process holds its lock") from error
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
