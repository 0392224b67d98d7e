"""The tiers below a node's memory, made from its settings: the one place that knows them all."""

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

HOURS = 24  # of a day: what may be saved up is an hour's share
LEAST_BURST_BYTES = 1 << 30


class _SharedBudget(WriteBudget):
    """One that the event loop and a tier's threads draw on."""

    def __init__(self, bytes_per_day: int, burst_bytes: int, *, now: Nanos):
        super().__init__(bytes_per_day, burst_bytes, now=now)
        self._lock = threading.Lock()

    def take(self, size_bytes: int, now: Nanos) -> bool:
        with self._lock:
            return super().take(size_bytes, now)


class _OpenTier(Struct, frozen=True, kw_only=True):
    """A tier, and what is known of it here."""

    tier: BackingTier
    rule: TierRule
    codecs: Codecs
    settings: AnyTier
    spend: Callable[[int], bool]
    """Charge its budget of writes so many bytes; False where they are not left."""


class BackingTiers:
    """All tiers of a node, in the order in which they are asked."""

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
        """Open every tier; may take seconds, for an SSD that holds much.

        Args:
            settings: One each.
            namespaces: By digest; raises `NamespaceUnknown`.
            credentials: What this node proves to its peers.
            clock: Of deadlines.
            held: Closes what was opened.

        Raises:
            StoreNotStarted: A tier cannot be had; the message begins with the setting, as in ``tiers[0].url: …``.
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
                _OpenTier(tier=tier, rule=rule, codecs=codecs, settings=each, spend=_rewriting(budget, clock))
            )
        return cls(opened)

    def open_namespace(self, namespace: KvNamespace) -> None:
        """Blocks of this kind may come.

        Raises:
            InvalidArgument: A tier's compression is not for values of this kind; names the field.
        """
        for each in self._opened:
            each.codecs.open(namespace)

    def refuge(self, *, leaving: bool, is_given_up: Callable[[int], bool]) -> int | None:
        """Where blocks go that other nodes are to find; None: nowhere, or they need not (`kvstore.service.evacuation`).

        Args:
            leaving: Whether the node goes, which is then its blocks' last way out.
            is_given_up: Whether a tier fails. Where all do, the first is meant nevertheless: it may come back.
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

    def depart_to(self, tier: int) -> None:
        """Blocks go to a `refuge` now. A node whose blocks go to its peers has left them from then on."""
        refuge = self.tiers[tier]
        if isinstance(refuge, RemoteTier) and isinstance(refuge.backend, PeerBackend):
            refuge.backend.leave()

    def may_write(self, tier: int, size_bytes: int) -> bool:
        """Charge the tier's budget of writes; False where nothing is left of it."""
        return self._opened[tier].spend(size_bytes)


@contextmanager
def _within(path: str) -> Iterator[None]:
    """What is refused is a field of the settings at that path."""
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
    """By digest; a namespace that is open on the node is never forgotten here."""

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
    """Copying blocks out of a segment that goes costs writes as well; so does what is written for another reason than reuse."""
    return lambda num_bytes: budget is None or budget.take(num_bytes, clock.now())
