"""Scaling in steps while pods change at random: budget, availability and ratio hold at every step, and the target is reached."""

import random

import msgspec
import pytest

from operators.replica_steps import PairSide, RevisionReplicas, ScaledRole, ScalingBounds, next_changes, targets


def a_pool(name="prefill", target=1, *replicas, **fields):
    given = {
        "side": PairSide(name),
        "gpus": 1,
        "surge": 1,
        "unavailable": 0,
        "revision": "new",
    }
    return ScaledRole(name=name, target=target, replicas=tuple(replicas), **(given | fields))


def up(count, revision="new"):
    """Return `count` replicas of a revision, all of which serve."""
    return RevisionReplicas(revision=revision, asked=count, pods=count, ready=count)


def as_dict(changes):
    return {(each.role, each.revision): each.replicas for each in changes}


class World:
    """Child objects whose pods follow the requested numbers, in an order that the test chooses."""

    def __init__(self, pools, bounds):
        self.pools, self.bounds = {pool.name: pool for pool in pools}, bounds

    def desired(self, name, **fields):
        self.pools[name] = msgspec.structs.replace(self.pools[name], **fields)

    def reconcile(self):
        """Request the next changes of replicas; return whether there were any."""
        pools = targets(list(self.pools.values()), self.bounds)
        changes = next_changes(pools, self.bounds)
        for change in changes:
            pool = self.pools[change.role]
            old = next(
                (each for each in pool.replicas if each.revision == change.revision),
                RevisionReplicas(revision=change.revision, asked=0),
            )
            others = tuple(each for each in pool.replicas if each.revision != change.revision)
            self.desired(change.role, replicas=(*others, msgspec.structs.replace(old, asked=change.replicas)))
        return bool(changes)

    def events(self):
        """Yield each event that may happen next, as a pair: role, and its replicas after the event."""
        for pool in self.pools.values():
            for at, each in enumerate(pool.replicas):
                after = []
                if each.pods < each.asked:
                    after.append({"pods": each.pods + 1})
                if each.pods > each.asked:
                    unready = each.pods - each.ready
                    after.append(
                        {"pods": each.pods - 1, "ready": each.ready - (not unready), "leaving": each.leaving + 1}
                    )
                if each.ready < min(each.pods, each.asked):
                    after.append({"ready": each.ready + 1})
                if each.leaving:
                    after.append({"leaving": each.leaving - 1})
                for fields in after:
                    replicas = list(pool.replicas)
                    replicas[at] = msgspec.structs.replace(each, **fields)
                    yield pool.name, tuple(replicas)

    def settle(self, most=3000):
        """Let events happen and changes be requested, in turn, until nothing is left to do."""
        for _ in range(most):
            happened = next(self.events(), None)
            if happened:
                self.desired(happened[0], replicas=happened[1])
            if not self.reconcile() and not happened:
                return
        raise AssertionError("it never came to rest")

    @property
    def gpus(self):
        return sum(pool.there * pool.gpus for pool in self.pools.values())


def test_missing_replicas_are_added_by_max_step():
    assert as_dict(next_changes([a_pool("alone", 5)], ScalingBounds(max_step=2))) == {("alone", "new"): 2}


def test_rebalance_under_full_budget_drains_before_growing():
    world = World([a_pool("prefill", 2, up(2)), a_pool("decode", 2, up(2))], ScalingBounds(gpu_budget=4))
    world.desired("prefill", target=3)
    world.desired("decode", target=1)

    assert world.reconcile()
    assert [pool.asked for pool in world.pools.values()] == [2, 1]
    assert not world.reconcile()  # the pod still exists
    world.desired("decode", replicas=(RevisionReplicas(revision="new", asked=1, pods=1, ready=1, leaving=1),))
    assert not world.reconcile()  # the pod is draining
    world.desired("decode", replicas=(up(1),))
    assert world.reconcile()
    assert [pool.asked for pool in world.pools.values()] == [3, 1]


def test_an_old_pair_stays_until_a_new_one_is_whole():
    pools = [
        a_pool("prefill", 1, up(1, "old"), up(1, "new")),
        a_pool("decode", 1, up(1, "old"), RevisionReplicas(revision="new", asked=1, pods=1, ready=0)),
    ]
    assert next_changes(pools, ScalingBounds()) == []

    pools[1] = a_pool("decode", 1, up(1, "old"), up(1, "new"))

    assert as_dict(next_changes(pools, ScalingBounds())) == {("prefill", "old"): 0, ("decode", "old"): 0}


def test_revert_keeps_serving_and_drops_failed_replicas():
    pool = a_pool("alone", 2, up(2, "first"), RevisionReplicas(revision="second", asked=1, pods=1), revision="first")

    assert as_dict(next_changes([pool], ScalingBounds())) == {("alone", "second"): 0}


def test_rollout_without_room_waits_unless_one_may_be_missing():
    full = a_pool("alone", 2, up(2, "old"))

    assert next_changes([full], ScalingBounds(gpu_budget=2)) == []
    assert as_dict(next_changes([msgspec.structs.replace(full, unavailable=1)], ScalingBounds(gpu_budget=2))) == {
        ("alone", "old"): 1
    }


def test_ratio_is_kept_by_changing_both_sides():
    pools = [a_pool("prefill", 2, up(1)), a_pool("decode", 4, up(2))]

    changes = next_changes(pools, ScalingBounds(least=(1, 2), most=(1, 2)))

    assert as_dict(changes) == {("prefill", "new"): 2, ("decode", "new"): 4}


@pytest.mark.parametrize(
    ("asked", "bounds", "possible"),
    [
        ((4, 1), ScalingBounds(most=(2, 1)), (2, 1)),
        ((1, 9), ScalingBounds(least=(1, 4)), (1, 4)),
        ((3, 3), ScalingBounds(gpu_budget=4), (2, 2)),
        ((1, 1), ScalingBounds(gpu_budget=1), (0, 1)),
        ((1, 1), ScalingBounds(most=(1, 2)), (1, 1)),
        ((0, 3), ScalingBounds(least=(1, 2)), (0, 3)),
    ],
)
def test_targets_are_lowered_to_what_is_possible(asked, bounds, possible):
    pools = targets([a_pool("prefill", asked[0]), a_pool("decode", asked[1])], bounds)

    assert tuple(pool.target for pool in pools) == possible


def serving(pools, name):
    """Return how many replicas of a role are ready and have a ready partner role in the same revision."""
    own = {each.revision: each.staying for each in pools[name].replicas}
    if name == "alone":
        return sum(own.values())
    partner = "decode" if name == "prefill" else "prefill"
    partners = {each.revision for each in pools[partner].replicas if each.staying}
    return sum(count for revision, count in own.items() if revision in partners)


@pytest.mark.parametrize("seed", range(150))
def test_limits_hold_at_every_step_and_the_end_is_reached(seed):
    chance = random.Random(seed)
    least, most = chance.choice([((1, 999), (999, 1)), ((1, 3), (2, 1)), ((1, 2), (1, 1))])
    bounds = ScalingBounds(
        gpu_budget=chance.choice([0, 6, 9, 14]), least=least, most=most, max_step=chance.randint(1, 3)
    )
    world = World([any_pool(name, chance) for name in ("prefill", "decode", "alone")], bounds)

    for _ in range(chance.randint(0, 60)):
        happening = list(world.events())
        choice = chance.randrange(len(happening) + 2)
        if choice < len(happening):
            world.desired(happening[choice][0], replicas=happening[choice][1])
        elif choice == len(happening):
            world.desired(chance.choice(sorted(world.pools)), target=chance.randint(0, 4))
        else:
            revision = chance.choice(["one", "two", "three"])
            for name in world.pools:
                world.desired(name, revision=revision)
        step_within_limits(world)

    world.settle()
    unfinished = [
        pool
        for pool in targets(list(world.pools.values()), bounds)
        if {each.revision: each.asked for each in pool.replicas if each.asked}
        != ({pool.revision: pool.target} if pool.target else {})
    ]
    # If the GPU budget has no room for a surge, a rollout waits; a condition reports this.
    without_room = [pool for pool in unfinished if bounds.gpu_budget and world.gpus + pool.gpus > bounds.gpu_budget]
    assert not unfinished or without_room, (bounds, world.pools)


def any_pool(name, chance):
    surge = chance.randint(0, 2)
    missing = chance.randint(0 if surge else 1, 2)
    return a_pool(name, chance.randint(0, 4), gpus=chance.randint(0, 2), surge=surge, unavailable=missing)


def step_within_limits(world):
    before, gpus = dict(world.pools), world.gpus
    resting = not any(each.changing for pool in before.values() for each in pool.replicas)
    world.reconcile()
    meant = {pool.name: pool for pool in targets(list(before.values()), world.bounds)}
    assert not world.bounds.gpu_budget or world.gpus <= max(world.bounds.gpu_budget, gpus)
    for name, pool in world.pools.items():
        if pool.asked > before[name].asked:
            assert pool.there <= max(meant[name].target + pool.surge, before[name].there)
        if (left := serving(world.pools, name)) < serving(before, name):
            partner = {"prefill": "decode", "decode": "prefill", "alone": "alone"}[name]
            least = meant[name].least_serving
            if resting and pool.asked == before[name].asked:
                least = min(1, least)  # prefill and decode waited for each other
            assert left >= least or not meant[partner].least_serving
