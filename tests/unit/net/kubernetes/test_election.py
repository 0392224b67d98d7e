"""Leader election: two candidates never lead at the same time, whatever their clocks say, and soon one of them leads."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.net.kubernetes.election import Election, ElectionStep, ObservedLease

DURATION, RENEW_WITHIN, RETRY = Nanos(15 * SECOND), Nanos(10 * SECOND), Nanos(2 * SECOND)


def found(holder, version="1"):
    return ObservedLease(holder=holder, version=version, duration=DURATION)


def test_lease_is_taken_after_its_duration_without_renewal():
    election = Election("me", RENEW_WITHIN)

    assert election.step(found("other"), Nanos(100 * SECOND)) is ElectionStep.WAIT
    assert election.step(found("other"), Nanos(114 * SECOND)) is ElectionStep.WAIT
    assert election.step(found("other", "2"), Nanos(115 * SECOND)) is ElectionStep.WAIT
    assert election.step(found("other", "2"), Nanos(130 * SECOND)) is ElectionStep.TAKE


def test_free_lease_is_taken_and_missing_one_created():
    assert Election("me", RENEW_WITHIN).step(found(""), Nanos(0)) is ElectionStep.TAKE
    assert Election("me", RENEW_WITHIN).step(None, Nanos(0)) is ElectionStep.CREATE


def test_leader_without_renewal_stops_before_takeover():
    election = Election("me", RENEW_WITHIN)
    election.wrote(Nanos(0))

    assert election.leads(Nanos(RENEW_WITHIN - 1))
    assert not election.leads(RENEW_WITHIN)
    election.wrote(Nanos(1))
    election.step(found("other", "2"), Nanos(2))
    assert not election.leads(Nanos(2))


def test_same_identity_leads_by_the_others_renewals():
    election = Election("me", RENEW_WITHIN)
    election.step(found("me"), Nanos(0))
    assert not election.leads(Nanos(0)), "it may be as old as can be"
    election.step(found("me", "2"), Nanos(2 * SECOND))
    assert election.leads(Nanos(9 * SECOND))
    assert not election.leads(Nanos(10 * SECOND))
    election.step(found("me", "2"), Nanos(8 * SECOND))
    assert not election.leads(Nanos(10 * SECOND)), "nobody has renewed it"
    election.step(found("other", "3"), Nanos(9 * SECOND))
    election.step(found("me", "4"), Nanos(11 * SECOND))
    assert not election.leads(Nanos(11 * SECOND))


class Server:
    """Fake API server with one Lease; it refuses a write that is based on an older version."""

    def __init__(self):
        self.holder, self.version = None, 0

    def read(self):
        return None if self.holder is None else found(self.holder, str(self.version))

    def write(self, holder, based_on):
        if based_on != (None if self.holder is None else str(self.version)):
            return False
        self.holder, self.version = holder, self.version + 1
        return True


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 6), st.booleans()), min_size=50, max_size=100
    )
)
def test_at_most_one_leads_over_a_slow_and_lossy_network(rounds):
    server, time = Server(), 0
    identities = ("a", "b", "c", "a")  # two processes of one identity
    candidates = [Election(each, RENEW_WITHIN) for each in identities]
    skews = (0, 1000, 77, 5)
    for who, pause, slow, lost in rounds:
        time += pause
        election, skew = candidates[who], skews[who]
        began = Nanos((time + skew) * SECOND)
        lease = server.read()
        step = election.step(lease, began)
        time += slow  # time passes between reading and writing
        if (
            step is not ElectionStep.WAIT
            and server.write(identities[who], None if lease is None else lease.version)
            and not lost
        ):
            election.wrote(began)

        leaders = {
            identities[index]
            for index, each in enumerate(candidates)
            if each.leads(Nanos((time + skews[index]) * SECOND))
        }
        assert len(leaders) <= 1
