"""LoRA slots: record which adapters an engine has loaded, at most one for each slot, and which of these are in use.

Rules:

1. A slot is free, idle (its adapter is loaded, and no request uses it) or used. An adapter that a request needs keeps
   the slot in which it is loaded. If it is not loaded, it takes a free slot. If no slot is free, it replaces the
   adapter that has been idle longest. If all slots are used, requests wait.
2. An adapter counts as loaded from the moment at which it takes its slot; the caller then has to load it.
"""

from collections import Counter, OrderedDict


class LoraSlots:
    """Assigns the LoRA slots of one engine to adapters."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()  # idle adapters, the longest idle one first
        self.loads = 0  # number of times since the start that an adapter took a slot and had to be loaded

    @property
    def loaded(self) -> tuple[str, ...]:
        return (*sorted(self._held), *self._idle)

    def takes(self, name: str) -> bool:
        """Return whether `hold` could find a slot for this adapter now."""
        return name in self._held or len(self._held) < self._slots

    def hold(self, name: str) -> bool:
        """Add a request that uses an adapter; return whether the adapter has to be loaded first.

        The caller has to check with `takes` that a slot is available.
        """
        assert self.takes(name), name
        there = name in self._held or name in self._idle
        self._idle.pop(name, None)
        self._held[name] += 1
        if not there:
            self.loads += 1
            while len(self._held) + len(self._idle) > self._slots:
                self._idle.popitem(last=False)
        return not there

    def release(self, name: str) -> None:
        """Record that a request with this adapter has ended; after the adapter's last request, its slot is idle (rule 1)."""
        self._held[name] -= 1
        assert self._held[name] >= 0, name
        if not self._held[name]:
            del self._held[name]
            self._idle[name] = None

    def check(self) -> None:
        """Assert that no more adapters are loaded than there are slots, and that an adapter is either idle or used."""
        assert len(self._held) + len(self._idle) <= self._slots
        assert not self._held.keys() & self._idle.keys()
        assert all(count > 0 for count in self._held.values())
