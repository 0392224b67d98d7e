"""What was noted of late, by key: a map of bounded size that forgets what was noted longest ago. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentMap(Generic[K, V]):
    """The newest `most` keys, each with its value; looking makes none newer. For one thread at a time."""

    def __init__(self, most: int):
        assert most >= 0, most
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()  # noted longest ago first

    def note(self, key: K, value: V) -> None:
        """It is the newest now, with this value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def forget(self, key: K) -> None:
        """It may be unknown already."""
        self._values.pop(key, None)

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        """Noted longest ago first."""
        return iter(self._values)
