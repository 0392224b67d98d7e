from kvstore.clock import SECOND, Nanos
from kvstore.pool.leases import BlockLease, LeaseTable


def test_ended_leases_leave_the_deadline_heap():
    leases = LeaseTable(epoch=1, limit=10)

    for _ in range(1000):
        leases.end(leases.grant(BlockLease([], is_use=True), Nanos(3600 * SECOND)))
        assert not list(leases.due(Nanos(0)))

    assert len(leases.deadlines) < 100
