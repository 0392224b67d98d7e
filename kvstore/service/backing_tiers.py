"""Backing tiers of a node: opens them from the settings. Only this module imports the code of all kinds of tiers."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec import Struct

from kvstore.client.store_client import StoreClient
from kvstore.clock import Clock, Nanos
from kvstore.codecs.registry import Codecs
from kvstore.errors import NamespaceUnknown, StoreNotStarted
from kvstore.hierarchy.admission import ReuseAdmission, WriteBudget
from kvstore.hierarchy.tier_states import AdmitEverything, TierAdmission, TierRule
from kvstore.namespace import KvNamespace
from kvstore.ports import BackingTier, Codec
from kvstore.security.credentials import Credentials
from kvstore.service.settings import AnyTier
from kvstore.tiers.peer.backend import PeerBackend, open_peers
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.redis.backend import open_redis
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.remote import RemoteTier
from kvstore.tiers.s3.backend import open_s3
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.settings import KeepPolicy, TierSettings
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.tier import SsdTier

# Hours of a day. An unused write budget grows to at most the bytes of one hour, or to `LEAST_BURST_BYTES` if that is
# more, but never beyond the bytes of a day.
HOURS = 24
LEAST_BURST_BYTES = 1 << 30


class _SharedBudget(WriteBudget):
    """Write budget of one tier, guarded by a lock, because the event loop and the tier's threads charge writes to it."""

    def __init__(self, bytes_per_day: int, burst_bytes: int, *, now: Nanos):
        super().__init__(bytes_per_day, burst_bytes, now=now)
        self._lock = threading.Lock()

    def take(self, size_bytes: int, now: Nanos) -> bool:
        with self._lock:
            return super().take(size_bytes, now)


class _OpenTier(Struct, frozen=True, kw_only=True):
    """One backing tier with its rule for the hierarchy, its codecs, its settings and its write budget."""

    tier: BackingTier
    rule: TierRule
    codecs: Codecs
    settings: AnyTier
    charge: Callable[[int], bool]
    """Charges a number of bytes to the tier's write budget; returns False if too little is left."""


class BackingTiers:
    """Holds all backing tiers of a node, in the order in which promotions ask them."""

    def __init__(self, opened: Sequence[_OpenTier]):
        self.tiers = [each.tier for each in opened]
        self.rules = [each.rule for each in opened]
        self._opened = opened

    @classmethod
    def open(
        cls,
        settings: Sequence[AnyTier],
        namespaces: Callable[[bytes], KvNamespace],
        credentials: Credentials,
        clock: Clock,
        held: ExitStack,
    ) -> "BackingTiers":
        """Open all tiers. This may take seconds for a large SSD tier. The tiers are closed when `held` is closed.

        `namespaces` returns a namespace by its digest or raises NamespaceUnknown. `credentials` are those for
        connections to peer nodes.

        Raises:
            StoreNotStarted: A tier cannot be opened; the message begins with the setting, such as ``tiers[0].url: …``.
        """
        opened = []
        for index, each in enumerate(settings):
            budget = _budget(each, clock)
            with _within(f"tiers[{index}].codec"):
                codecs = Codecs(each.codec)
            with _within(f"tiers[{index}]"):
                tier = _open(each, _codec_of(codecs, namespaces), namespaces, budget, credentials, clock)
            held.callback(tier.close)
            admission = _admission(each, budget)
            rule = TierRule(name=tier.name, admission=admission, finds_in_memory=tier.finds_in_memory)
            opened.append(
                _OpenTier(tier=tier, rule=rule, codecs=codecs, settings=each, charge=_rewriting(budget, clock))
            )
        return cls(opened)

    def open_namespace(self, namespace: KvNamespace) -> None:
        """Prepare the tiers for a namespace.

        Raises:
            InvalidArgument: The compression of a tier does not support the namespace's data type.
            LayoutMismatch: The namespace's layout is invalid, or its block size does not match its other fields.
        """
        for each in self._opened:
            each.codecs.open(namespace)

    def evacuation_tier(self, *, leaving: bool, is_given_up: Callable[[int], bool]) -> int | None:
        """Return the index of the tier to which blocks are evacuated; None if no tier is suitable.

        Redis and S3 are suitable, in this order. If the node is `leaving`, its peers and then its own disk are suitable
        too (`kvstore.service.evacuation`). A tier with `keep = "none"` is not suitable. `is_given_up` returns for the
        index of a tier whether its last few writes have all failed. Return the first suitable tier that is not given
        up. If all of them are given up, return the first suitable tier, because it may recover.
        """
        kinds: tuple[type[TierSettings], ...] = (RedisSettings, S3Settings)
        if leaving:
            kinds += (PeerSettings, SsdSettings)
        fitting = [
            index
            for kind in kinds
            for index, each in enumerate(self._opened)
            if isinstance(each.settings, kind) and each.settings.keep is not KeepPolicy.NONE
        ]
        return next((index for index in fitting if not is_given_up(index)), next(iter(fitting), None))

    def begin_evacuation(self, tier: int) -> None:
        """Prepare a tier for an evacuation.

        The peer tier pushes all demoted blocks to other nodes from now on; other tiers need no preparation.
        """
        evacuation_tier = self.tiers[tier]
        if isinstance(evacuation_tier, RemoteTier) and isinstance(evacuation_tier.backend, PeerBackend):
            evacuation_tier.backend.leave()

    def may_write(self, tier: int, size_bytes: int) -> bool:
        """Charge a write to the tier's write budget; return False if too little of the budget is left."""
        return self._opened[tier].charge(size_bytes)


@contextmanager
def _within(path: str) -> Iterator[None]:
    """Add the path of a tier's settings to the message of each StoreNotStarted that the context raises."""
    try:
        yield
    except StoreNotStarted as error:
        raise StoreNotStarted(f"{path}.{error}") from error


def _open(
    settings: AnyTier,
    codecs: Callable[[bytes], Codec],
    namespaces: Callable[[bytes], KvNamespace],
    budget: WriteBudget | None,
    credentials: Credentials,
    clock: Clock,
) -> BackingTier:
    match settings:
        case SsdSettings():
            return SsdTier.open(settings, codecs=codecs, clock=clock, admit_rewrite=_rewriting(budget, clock))
        case PeerSettings():

            def connect(address: str, namespace: KvNamespace, timeout_seconds: float) -> StoreClient:
                return StoreClient.connect(
                    address, namespace, timeout_seconds=timeout_seconds, credentials=credentials, clock=clock
                )

            return open_peers(settings, connect, namespaces=namespaces, clock=clock)
        case RedisSettings():
            return open_redis(settings, codecs=codecs, clock=clock)
        case S3Settings():
            return open_s3(settings, codecs=codecs, clock=clock)


def _codec_of(codecs: Codecs, namespaces: Callable[[bytes], KvNamespace]) -> Callable[[bytes], Codec]:
    """Return a function that returns the codec of a namespace by its digest.

    The function raises NamespaceUnknown if the namespace is not open on the node.
    """

    def codec(digest: bytes) -> Codec:
        try:
            return codecs.of(digest)
        except NamespaceUnknown:
            return codecs.open(namespaces(digest))

    return codec


def _admission(settings: TierSettings, budget: WriteBudget | None) -> TierAdmission | None:
    if settings.keep is KeepPolicy.NONE or (isinstance(settings, PeerSettings) and not settings.push):
        return None
    if settings.keep is KeepPolicy.REUSED:
        return ReuseAdmission(budget=budget)
    return AdmitEverything() if budget is None else ReuseAdmission(predict=lambda _: 1.0, budget=budget)


def _budget(settings: TierSettings, clock: Clock) -> WriteBudget | None:
    daily = settings.daily_write_bytes
    if not daily:
        return None
    return _SharedBudget(daily, min(daily, max(daily // HOURS, LEAST_BURST_BYTES)), now=clock.now())


def _rewriting(budget: WriteBudget | None, clock: Clock) -> Callable[[int], bool]:
    """Return a function that charges a number of bytes to the budget, and returns False if too little is left.

    A tier calls the function before writes that no admission rule has charged, such as the copies of blocks that are
    rescued from an evicted segment.
    """
    return lambda num_bytes: budget is None or budget.take(num_bytes, clock.now())
