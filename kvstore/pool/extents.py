"""Free space of a pool: best fit with coalescing.

Rules:

1. Space is counted in pages; every extent begins on a page boundary, whatever its namespace's block size.
2. Neighbouring free extents are always one, so that blocks of one size leave room for blocks of another.
3. An extent is taken from the smallest free one that is large enough: blocks of one size refill their own holes.
   Taking and giving back cost O(log n) in the number of distinct sizes of holes, which is small.
"""

from bisect import bisect_left, insort

PAGE_BYTES = 4096
"""Blocks begin on page boundaries: O_DIRECT, huge pages and DMA all want it."""


class FreeExtents:
    """Which bytes of a space are free."""

    def __init__(self, capacity_bytes: int):
        pages = capacity_bytes // PAGE_BYTES
        self._pages = pages
        self._free_pages = 0
        self._starts: dict[int, int] = {}  # first page of a free extent -> pages
        self._ends: dict[int, int] = {}  # page after it -> first page
        self._by_size: dict[int, dict[int, None]] = {}  # pages -> first pages, an ordered set
        self._sizes: list[int] = []  # keys of _by_size, ascending
        if pages:
            self._add(0, pages)

    @property
    def capacity_bytes(self) -> int:
        return self._pages * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._free_pages * PAGE_BYTES

    def take(self, length: int) -> int | None:
        """Offset in bytes of an extent of `length` bytes; None when there is no hole that large."""
        pages = pages_for(length)
        if self._free_pages < pages:
            return None
        place = bisect_left(self._sizes, pages)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        first = next(reversed(self._by_size[size]))
        self._remove(first, size)
        if size > pages:
            self._add(first + pages, size - pages)
        return first * PAGE_BYTES

    def take_several(self, length: int, count: int) -> list[int]:
        """Offsets of up to `count` extents of `length` bytes: those that as many calls of `take` would give, in that order."""
        pages = pages_for(length)
        offsets: list[int] = []
        while len(offsets) < count and (place := bisect_left(self._sizes, pages)) < len(self._sizes):
            size = self._sizes[place]
            first = next(reversed(self._by_size[size]))
            taken = min(size // pages, count - len(offsets)) * pages
            self._remove(first, size)
            if size > taken:
                self._add(first + taken, size - taken)
            offsets += range(first * PAGE_BYTES, (first + taken) * PAGE_BYTES, pages * PAGE_BYTES)
        return offsets

    def give_back(self, offset: int, length: int) -> None:
        """Frees what `take` gave."""
        first, pages = offset // PAGE_BYTES, pages_for(length)
        assert offset % PAGE_BYTES == 0, offset
        assert 0 <= first <= self._pages - pages, (offset, length)
        after = self._starts.get(first + pages)
        if after is not None:
            self._remove(first + pages, after)
            pages += after
        before = self._ends.get(first)
        if before is not None:
            size = first - before
            self._remove(before, size)
            first, pages = before, pages + size
        self._add(first, pages)

    def check(self) -> None:
        """Asserts the rules; `_starts` is the truth that the others are compared with."""
        assert sum(self._starts.values()) == self._free_pages
        assert self._ends == {first + size: first for first, size in self._starts.items()}
        assert self._sizes == sorted(set(self._starts.values()))
        assert {size: set(firsts) for size, firsts in self._by_size.items()} == {
            size: {first for first, held in self._starts.items() if held == size} for size in self._sizes
        }
        end = -1
        for first, size in sorted(self._starts.items()):
            assert first > end, "free extents overlap or touch"
            end = first + size
        assert end <= self._pages

    def free_extents(self) -> list[tuple[int, int]]:
        """Offsets and lengths in bytes, ascending."""
        return [(first * PAGE_BYTES, size * PAGE_BYTES) for first, size in sorted(self._starts.items())]

    def _add(self, first: int, pages: int) -> None:
        self._starts[first] = pages
        self._ends[first + pages] = first
        if pages not in self._by_size:
            self._by_size[pages] = {}
            insort(self._sizes, pages)
        self._by_size[pages][first] = None
        self._free_pages += pages

    def _remove(self, first: int, pages: int) -> None:
        del self._starts[first], self._ends[first + pages]
        firsts = self._by_size[pages]
        del firsts[first]
        if not firsts:
            del self._by_size[pages]
            self._sizes.remove(pages)
        self._free_pages -= pages


def pages_for(length: int) -> int:
    """Pages that `length` bytes occupy."""
    return -(-length // PAGE_BYTES)


def occupied_bytes(length: int) -> int:
    """What `length` bytes take away from the free ones."""
    return pages_for(length) * PAGE_BYTES
