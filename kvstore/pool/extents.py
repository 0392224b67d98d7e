"""Free extents of a pool: best-fit allocation with coalescing.

Rules:

1. Space is counted in pages. Each extent begins at a page boundary, even if the size of the blocks is not a multiple
   of the page size.
2. Neighbouring free extents are always merged, so that blocks of one size leave room for blocks of another size.
3. An extent is taken from the smallest free extent that is large enough, so new blocks fill the gaps that blocks of the
   same size have left. The time to allocate or free depends only on the number of distinct sizes of free extents, which
   is small.
"""

from bisect import bisect_left, insort

PAGE_BYTES = 4096
"""Size of a page. Blocks begin at page boundaries because O_DIRECT, huge pages and DMA require it."""


class FreeExtents:
    """Records which extents of a byte range are free, and allocates extents from them."""

    def __init__(self, capacity_bytes: int):
        pages = capacity_bytes // PAGE_BYTES
        self._pages = pages
        self._free_pages = 0
        self._starts: dict[int, int] = {}  # first page of each free extent -> number of its pages
        self._ends: dict[int, int] = {}  # first page after each free extent -> first page of the extent
        # Maps a number of pages to the first pages of the free extents of that size, in the order of insertion.
        self._by_size: dict[int, dict[int, None]] = {}
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
        """Allocate an extent of `length` bytes and return its offset; None if no free extent is large enough."""
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
        """Allocate up to `count` extents of `length` bytes each, and return their offsets.

        The result is the same as with repeated calls of `take`. The list is shorter than `count` if the space does not
        suffice.
        """
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
        """Free an extent that `take` or `take_several` returned."""
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
        """Assert that all structures agree with `_starts`, and that neighbouring free extents are merged; for tests."""
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
        """Return offsets and lengths of the free extents in bytes, ascending."""
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
    """Return the number of pages that `length` bytes occupy."""
    return -(-length // PAGE_BYTES)


def occupied_bytes(length: int) -> int:
    """Return the bytes of the pages that `length` bytes occupy."""
    return pages_for(length) * PAGE_BYTES
