"""The tiers below a node's memory, made from its settings: the one place that knows them all."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.client import StoreClient
from kvstore.clock import Clock
from kvstore.codecs.registry import Codecs
from kvstore.hierarchy import Admission, Everything, TierRule
from kvstore.layout import Namespace
from kvstore.ports import BackingTier, Codec
from kvstore.settings import AnyTier
from kvstore.tiers.peer import PeerSettings, PeerTier
from kvstore.tiers.redis import RedisSettings, RedisTier
from kvstore.tiers.s3 import S3Settings, S3Tier
from kvstore.tiers.settings import Keep, TierSettings
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.tier import SsdTier


class Backing:
    """All tiers of a node, in the order in which they are asked."""

    def __init__(self, tiers: Sequence[BackingTier], rules: Sequence[TierRule], codecs: Sequence[Codecs]):
        self.tiers = tiers
        self.rules = rules
        self._codecs = codecs

    @classmethod
    def open(
        cls, settings: Sequence[AnyTier], namespaces: Callable[[bytes], Namespace], clock: Clock, held: ExitStack
    ) -> "Backing":
        """Open every tier; may take seconds, for an SSD that holds much.

        Args:
            settings: One each.
            namespaces: By digest; raises `NamespaceUnknown`.
            clock: Of deadlines.
            held: Closes what was opened.

        Raises:
            StoreNotStarted: A tier cannot be had; names it and the setting.
        """
        tiers, rules, all_codecs = [], [], []
        for each in settings:
            codecs = Codecs(each.codec)
            tier = _open(each, codecs.of, namespaces, clock)
            held.callback(tier.close)
            tiers.append(tier)
            rules.append(TierRule(name=tier.name, admission=_admission(each)))
            all_codecs.append(codecs)
        return cls(tiers, rules, all_codecs)

    def open_namespace(self, namespace: Namespace) -> None:
        """Blocks of this kind may come.

        Raises:
            InvalidArgument: A tier's compression is not for values of this kind; names the field.
        """
        for codecs in self._codecs:
            codecs.open(namespace)


def _open(
    settings: AnyTier, codecs: Callable[[bytes], Codec], namespaces: Callable[[bytes], Namespace], clock: Clock
) -> BackingTier:
    match settings:
        case SsdSettings():
            return SsdTier.open(settings, codecs=codecs, clock=clock)
        case PeerSettings():

            def connect(address: str, namespace: Namespace, timeout_seconds: float) -> StoreClient:
                return StoreClient.connect(address, namespace, timeout_seconds=timeout_seconds, clock=clock)

            return PeerTier(settings, connect, namespaces=namespaces, clock=clock)
        case RedisSettings():
            return RedisTier.open(settings, codecs=codecs, clock=clock)
        case S3Settings():
            return S3Tier.open(settings, codecs=codecs, clock=clock)


def _admission(settings: TierSettings) -> Admission | None:
    if isinstance(settings, PeerSettings) and not settings.push:
        return None
    match settings.keep:
        case Keep.NONE:
            return None
        case Keep.ALL | Keep.REUSED:
            return Everything()
