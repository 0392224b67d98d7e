"""Tests of the router's demand counters: which requests count, and what the router measures for each of them."""

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import percentile
from fleet.core.errors import Reason
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from tests.support.builders import MODEL, a_handoff, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

TEN = Sampling(temperature=0.0, max_tokens=10)


def later(driver, seconds):
    driver.now = Nanos(driver.now + round(seconds * SECOND))


def demand_of(driver):
    (found,) = driver.machine.demand_by_model(driver.now)
    return found


def arrive(driver, name="r1", tokens=100, **fields):
    return driver.send(an_arrival(request_id=name, tokens=tokens, sampling=TEN, **fields))


def test_served_request_gives_tokens_and_times():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    work = the(Dispatch, arrive(driver))
    later(driver, 0.5)
    driver.step(work, 1)
    later(driver, 0.9)
    driver.step(work, *range(2, 11), finish=Finish.LENGTH)

    found = demand_of(driver)

    assert (found.model, found.arrivals, found.finished, found.abandoned, found.refused) == (MODEL, 1, 1, 0, 0)
    assert (found.prompt_tokens, found.answer_tokens, found.queued) == (100, 10, 0)
    assert 0.4 < percentile(found.ttft, 1.0) < 0.7
    assert 0.09 < percentile(found.tpot, 1.0) < 0.14
    assert sum(found.queue_wait) == 1
    last, (sampled,) = driver.machine.demand.recent(0)
    assert (sampled.prompt_tokens, sampled.answer_tokens, sampled.arrived) == (
        100,
        10,
        driver.now - round(1.4 * SECOND),
    )
    assert len(sampled.block_keys) == 100 // sampled.block_tokens
    assert driver.machine.demand.recent(last) == (last, ())


def test_handed_over_request_counts_once():
    driver = RouterMachineDriver(("p1", Role.PREFILL), ("d1", Role.DECODE), remote_prefill_min_tokens=0)
    prefill = the(Dispatch, arrive(driver))
    decode = the(Dispatch, driver.step(prefill, 1, finish=Finish.LENGTH, handoff=a_handoff(num_tokens=100)))
    driver.step(decode, *range(2, 11), finish=Finish.LENGTH)

    found = demand_of(driver)

    assert (found.arrivals, found.finished, found.answer_tokens, sum(found.ttft)) == (1, 1, 10, 1)


def test_waiting_request_shows_in_the_gauges():
    driver = RouterMachineDriver(("w1", Role.BOTH), oversubscribe=1.0)
    driver.join("w2", Role.BOTH, max_running=1)
    driver.leave("w1")
    arrive(driver)
    arrive(driver, "r2")
    later(driver, 3)

    found = demand_of(driver)

    assert (found.arrivals, found.waited, found.queued, found.oldest_seconds) == (2, 1, 1, 3.0)


def test_request_whose_client_left_early_is_abandoned():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    arrive(driver)
    driver.cancel()

    found = demand_of(driver)

    assert (found.arrivals, found.abandoned, found.finished, found.uncounted_tokens) == (1, 1, 0, 100)


def test_request_stopped_after_its_first_token_is_served():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    work = the(Dispatch, arrive(driver))
    driver.step(work, 1, 2)
    driver.cancel()

    found = demand_of(driver)

    assert (found.abandoned, found.finished, found.answer_tokens) == (0, 1, 2)


def test_request_that_failed_after_its_first_token_is_served():
    driver = RouterMachineDriver(("w1", Role.BOTH), max_attempts=1)
    work = the(Dispatch, arrive(driver))
    driver.step(work, 1, 2, 3)
    driver.reject(work, Reason.INTERNAL)

    found = demand_of(driver)

    assert (found.refused, found.finished, found.answer_tokens, found.answer_squares) == (0, 1, 3, 9)


def test_relayed_answer_in_one_report_is_served():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    work = the(Dispatch, arrive(driver, only_end=True))
    later(driver, 0.5)
    driver.step(work, 1, 2, 3, finish=Finish.STOP)

    found = demand_of(driver)

    assert (found.abandoned, found.finished, found.answer_tokens, found.uncounted_tokens) == (0, 1, 3, 0)
    assert 0.4 < percentile(found.ttft, 1.0) < 0.7


def test_refusals_for_load_and_wrong_requests_differ():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    driver.join("w2", Role.BOTH)
    arrive(driver, "late", deadline=Nanos(1))
    work = the(Dispatch, arrive(driver, "wrong"))
    driver.reject(work, Reason.INVALID_ARGUMENT, "sampling.top_k")

    found = demand_of(driver)

    assert (found.arrivals, found.refused, found.invalid, found.uncounted_tokens) == (2, 1, 1, 100)


def test_retried_request_counts_once():
    driver = RouterMachineDriver(("w1", Role.BOTH), ("w2", Role.BOTH))
    first = the(Dispatch, arrive(driver))
    later(driver, 2)
    second = the(Dispatch, driver.leave(first.worker_id))
    driver.step(second, *range(10), finish=Finish.LENGTH)

    found = demand_of(driver)

    assert (found.arrivals, found.finished, sum(found.ttft)) == (1, 1, 1)
    assert percentile(found.ttft, 1.0) > 1.9
    assert percentile(found.queue_wait, 1.0) < 0.1


def test_sample_is_spread_and_bounded():
    driver = RouterMachineDriver(("w1", Role.BOTH))
    for number in range(1000):
        work = the(Dispatch, arrive(driver, f"r{number}", tokens=40))
        driver.step(work, *range(10), finish=Finish.LENGTH)
        later(driver, 0.002)

    last, sample = driver.machine.demand.recent(0)
    _, newer = driver.machine.demand.recent(last - 3)

    assert 120 <= last <= 129  # two seconds, 64 a second
    assert len(sample) == 64
    assert sample[-1].arrived - sample[0].arrived > 0.9 * SECOND
    assert newer == sample[-3:]


def test_model_without_workers_is_demand_that_was_refused():
    driver = RouterMachineDriver()
    driver.machine.demand.turned_away(MODEL)

    found = demand_of(driver)

    assert (found.arrivals, found.refused) == (1, 1)
