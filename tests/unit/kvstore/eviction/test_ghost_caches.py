"""Ghost caches: the most used namespaces have one, within the limit."""

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.ghost_cache import HALF_LIFE
from kvstore.eviction.ghost_caches import MAX_GHOST_CACHES, MAX_NAMESPACES, GhostCaches
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain, a_namespace

CHAIN = a_chain(10)


def namespaces(count: int, of: str = "adapter"):
    return [a_namespace(lora=f"{of}{number}") for number in range(count)]


def ghost_caches(*opened) -> GhostCaches:
    ghost_caches = GhostCaches(100 * BLOCK_BYTES, "lru")
    for namespace in opened:
        ghost_caches.open(namespace)
    return ghost_caches


def looked_at(ghost_caches: GhostCaches) -> set[str]:
    return {each.fingerprint for each in ghost_caches.estimates()}


def use(ghost_caches: GhostCaches, namespace, times: int = 1, now: int = 0) -> None:
    for _ in range(times):
        ghost_caches.looked_up(namespace.digest, CHAIN, Nanos(now))
        ghost_caches.stored(namespace.digest, CHAIN, Nanos(now))


def test_first_namespaces_get_a_ghost_cache_within_the_limit():
    opened = namespaces(MAX_GHOST_CACHES + 3)

    assert looked_at(ghost_caches(*opened)) == {each.fingerprint for each in opened[:MAX_GHOST_CACHES]}


def test_busy_namespace_replaces_the_least_used_one():
    *first, newcomer = opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for number, namespace in enumerate(first):
        use(found, namespace, times=10 - number)  # the last namespace is used three times

    use(found, newcomer, times=5)
    assert newcomer.fingerprint not in looked_at(found), "it is used less than twice as much"
    use(found, newcomer)

    assert looked_at(found) == {each.fingerprint for each in (*first[:-1], newcomer)}
    (estimate,) = [each for each in found.estimates() if each.fingerprint == newcomer.fingerprint]
    assert estimate.estimates[0].hit_rate == 0
    use(found, newcomer)
    (estimate,) = [each for each in found.estimates() if each.fingerprint == newcomer.fingerprint]
    assert estimate.estimates[0].hit_rate > 0


def test_equally_used_namespaces_do_not_replace_each_other():
    opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for _ in range(20):
        for namespace in opened:
            use(found, namespace)

    assert looked_at(found) == {each.fingerprint for each in opened[:-1]}


def test_old_uses_of_a_namespace_lose_weight():
    *first, newcomer = opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for namespace in first:
        use(found, namespace, times=100)

    use(found, newcomer, times=13, now=4 * HALF_LIFE)

    assert newcomer.fingerprint in looked_at(found), "13 uses against 100 uses that have lost 15/16 of their weight"


def test_forgotten_namespace_can_return():
    opened = namespaces(MAX_NAMESPACES)
    found = ghost_caches(*opened)
    for namespace in opened[1:]:
        use(found, namespace)

    for namespace in namespaces(5, "late"):
        found.open(namespace)

    assert len(found._namespaces) == MAX_NAMESPACES
    assert opened[0].fingerprint not in looked_at(found)
    use(found, opened[0])
    found.open(opened[0])
    use(found, opened[0], times=100, now=SECOND)
    assert opened[0].fingerprint in looked_at(found)
    assert len(looked_at(found)) == MAX_GHOST_CACHES
