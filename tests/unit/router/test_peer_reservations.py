"""Several routers over the same workers: the reservations of one router count for the others."""

import random
from collections import Counter

import pytest

from fleet.core.ids import WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from fleet.router.messages import PeerLeft, PeerReserved, ReservationTotals
from tests.support.builders import a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

GREEDY = Sampling(temperature=0.0, max_tokens=8)
WORKERS = [(f"d{number}", Role.DECODE) for number in range(8)]
RUNNING = 12  # few on each worker, so that it shows if a router ignores its peers


def told(driver, replica="other", **booked):
    return driver.send(
        PeerReserved(
            replica=replica,
            booked={WorkerId(worker): ReservationTotals(*numbers) for worker, numbers in booked.items()},
        )
    )


def arrive(driver, name, **fields):
    return driver.send(an_arrival(request_id=name, sampling=GREEDY, **fields))


def test_worker_loaded_by_a_peer_is_avoided():
    router = RouterMachineDriver(("d1", Role.DECODE), ("d2", Role.DECODE))
    told(router, d1=(1000, 40.0, 2))
    assert the(Dispatch, arrive(router, "r1")).worker_id == "d2"
    told(router, d2=(1000, 40.0, 2))  # this report replaces the earlier one
    assert the(Dispatch, arrive(router, "r2", tokens=a_prompt(10, first=900))).worker_id == "d1"


def test_worker_filled_by_peers_has_no_room():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("d1", max_running=2)
    told(router, "one", d1=(0, 1.0, 1))
    told(router, "two", d1=(0, 1.0, 1))
    assert not arrive(router, "r1")
    moved = told(router, "two")
    assert the(Dispatch, moved).worker_id == "d1"


def test_reservations_of_a_departed_peer_are_released():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("d1", max_running=1)
    told(router, d1=(0, 1.0, 1))
    assert not arrive(router, "r1")
    assert the(Dispatch, router.send(PeerLeft(replica="other"))).worker_id == "d1"


def test_peer_reservations_apply_when_the_worker_joins():
    router = RouterMachineDriver(("d1", Role.DECODE))
    told(router, d2=(5000, 200.0, 9))
    router.join("d2")
    assert the(Dispatch, arrive(router, "r1")).worker_id == "d1"


def test_router_reports_only_its_own_reservations():
    router = RouterMachineDriver(("d1", Role.DECODE), ("d2", Role.DECODE))
    told(router, d1=(1000, 40.0, 2))
    work = the(Dispatch, arrive(router, "r1", tokens=100))
    assert router.machine.booked() == {WorkerId("d2"): ReservationTotals(100, 4.0, 1)}
    router.step(work, 1, finish=Finish.STOP)
    assert router.machine.booked() == {}


def test_peers_soon_hear_of_all_changes_but_growing_answers():
    """Change reservations: peers are told soon, except if an answer grows, which happens in nearly every step."""
    router = RouterMachineDriver(("d1", Role.DECODE), ("d2", Role.DECODE), replicas_listen="unix:/run/replicas")
    prompts = router.machine.prompts

    def is_due() -> bool:
        due = prompts.changes > 0
        prompts.news()
        return due

    assert not is_due()
    work = the(Dispatch, router.send(an_arrival(request_id="r1", tokens=100, sampling=Sampling(max_tokens=200))))
    assert is_due()
    router.step(work, 1)
    assert is_due(), "the prompt is computed"
    before = router.machine.booked()
    for token in range(2, 80):
        router.step(work, token)
    assert router.machine.booked() != before
    assert not is_due()
    router.step(work, 80, finish=Finish.STOP)
    assert is_due()
    arrive(router, "r2")
    is_due()
    router.leave("d1")
    router.leave("d2")
    assert is_due()


@pytest.mark.parametrize("between", [1, 2])
def test_peers_balance_nearly_as_well_as_one_router(between):
    """Compare one router with several that report every few requests: the busiest worker has at most 1.2 times the load."""

    def busiest(routers: int) -> float:
        drivers = [RouterMachineDriver(*WORKERS, seed=seed) for seed in range(routers)]
        dice = random.Random(3)
        running: list[tuple[RouterMachineDriver, Dispatch]] = []
        seen: list[float] = []
        for number in range(600):
            driver = drivers[number % routers]
            tokens = a_prompt(dice.randrange(50, 1500), first=2000 * number)
            running.append((driver, the(Dispatch, arrive(driver, f"r{number}", tokens=tokens))))
            if len(running) > RUNNING:
                owner, work = running.pop(dice.randrange(len(running)))
                owner.step(work, 1, finish=Finish.STOP)
            if number % between == 0:
                for one in drivers:
                    for index, other in enumerate(drivers):
                        if other is not one:
                            one.send(PeerReserved(replica=str(index), booked=other.machine.booked()))
            tokens_by_worker: Counter[str] = Counter()
            for each in drivers:
                for worker, booked in each.machine.booked().items():
                    tokens_by_worker[worker] += booked.prefill_tokens
            if number > 100:
                seen.append(max(tokens_by_worker.values()) / (sum(tokens_by_worker.values()) / len(WORKERS)))
        return sum(seen) / len(seen)

    assert busiest(4) <= 1.2 * busiest(1)
