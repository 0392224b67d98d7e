from kvstore.circuit_breaker import COST_FACTOR, FIRST_PAUSE, LONGEST_PAUSE, CircuitBreaker
from kvstore.clock import SECOND, Nanos


def test_one_caller_tries_per_pause_after_a_failure():
    breaker = CircuitBreaker()
    breaker.failed(Nanos(0), Nanos(0))

    assert not breaker.allows(Nanos(FIRST_PAUSE - 1))
    assert breaker.allows(FIRST_PAUSE)
    assert not breaker.allows(FIRST_PAUSE)
    assert breaker.allows(Nanos(2 * FIRST_PAUSE))


def test_pauses_double_up_to_a_limit():
    breaker = CircuitBreaker()
    now, pauses = Nanos(0), []
    for _ in range(8):
        breaker.failed(now, now)
        pauses.append(
            next(span for span in range(0, 2 * LONGEST_PAUSE, SECOND // 20) if breaker.allows(Nanos(now + span)))
        )
        now = Nanos(now + pauses[-1])

    assert pauses == sorted(pauses)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_hanging_node_costs_at_most_a_fifth_of_the_time():
    breaker = CircuitBreaker()
    breaker.failed(Nanos(0), Nanos(SECOND))

    assert not breaker.allows(Nanos(SECOND + COST_FACTOR * SECOND - 1))
    assert breaker.allows(Nanos(SECOND + COST_FACTOR * SECOND))


def test_success_resets_the_failures():
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.failed(Nanos(0), Nanos(0))
    breaker.succeeded()

    assert breaker.closed
    assert breaker.allows(Nanos(0))
    breaker.failed(Nanos(0), Nanos(0))
    assert breaker.allows(FIRST_PAUSE)
