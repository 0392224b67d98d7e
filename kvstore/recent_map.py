"""Recent map: a map of bounded size. When it is full, it forgets the key that was set the longest time ago."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentMap(Generic[K, V]):
    """Holds the `most` keys that were set last, with their values. Reading a key does not count as setting it.

    Not thread-safe.
    """

    def __init__(self, most: int):
        assert most >= 0, most
        self._most = most
        # The keys are in the order in which they were last set; the key that was set the longest time ago is first.
        self._values: OrderedDict[K, V] = OrderedDict()

    def note(self, key: K, value: V) -> None:
        """Set the value of a key, and make this key the newest. If there are too many keys, forget the oldest one."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def forget(self, key: K) -> None:
        """Remove a key, which may be missing."""
        self._values.pop(key, None)

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, beginning with the one that was set the longest time ago."""
        return iter(self._values)
