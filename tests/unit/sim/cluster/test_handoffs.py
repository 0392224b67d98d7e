"""Direct handoffs: which worker keeps blocks, and until when."""

import pytest

from fleet.batching.attempts import EngineLimits, Job
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.roles import KvPath
from fleet.core.work import Handoff
from fleet.sim.cluster.handoffs import LEASE, Handoffs, TransferEndpoint, handoff_params
from fleet.sim.cluster.network import Network
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_engine import VirtualEngine

BLOCK = 16
PREFILL, DECODE = WorkerId("prefill"), WorkerId("decode")
KEYS = tuple(range(1, 7))


class Times:
    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        return 0.010 + 0.001 * prefill_tokens


class Pair:
    """A prefill and a decode worker, with a link of a hundred blocks a second."""

    def __init__(self, prefill_blocks: int = 100, decode_blocks: int = 100):
        self.kernel = Kernel(1)
        self.network = Network(self.kernel)
        self.handoffs = Handoffs(self.kernel, self.network, BLOCK)
        self.prefill = self._engine(PREFILL, prefill_blocks)
        self.decode = self._engine(DECODE, decode_blocks)
        self.ended: dict[str, Nanos] = {}

    def _engine(self, worker: WorkerId, blocks: int) -> VirtualEngine:
        supply = Supply(self.handoffs)
        limits = EngineLimits(kv_blocks=blocks, block_tokens=BLOCK, max_running=8, step_tokens=512)

        def tell(told):
            for each in told:
                if each.ended:
                    self.ended[each.attempt_id] = self.kernel.now()
                    if self.prefill.keeps(each.attempt_id):
                        self.handoffs.computed(PREFILL, each.attempt_id)

        engine = VirtualEngine(self.kernel, Times(), limits, tell, lambda *_: None, supply)
        self.network.join(worker, 100.0 * BLOCK)
        self.handoffs.join(worker, TransferEndpoint(engine=engine, bytes_per_token=1.0, latency=Nanos(0)))
        return engine

    def compute(self) -> None:
        """Compute a prompt of six blocks."""
        job = Job(attempt_id=RequestId("a#1"), prompt_tokens=96, answer_tokens=1, keys=KEYS, handed_off=True)
        self.prefill.submit(job)
        self.kernel.run(until=Nanos(SECOND))
        assert self.prefill.kv_blocks_used == 7

    def take(self) -> None:
        job = Job(attempt_id=RequestId("a#2"), prompt_tokens=96, answer_tokens=2, keys=KEYS, fetched_tokens=95)
        handoff = Handoff(
            kv_path=KvPath.DIRECT,
            prefill_worker=PREFILL,
            fingerprint="",
            num_tokens=95,
            params=handoff_params(RequestId("a#1")),
        )
        self.handoffs.take(DECODE, job, handoff)


class Supply:
    def __init__(self, handoffs: Handoffs):
        self._handoffs = handoffs

    def offer(self, job: Job, here: int) -> int:
        return self._handoffs.offered(job)

    def fetch(self, job: Job, here: int) -> None:
        self._handoffs.fetch(job, here)


def test_blocks_are_kept_until_transfer_ends():
    pair = Pair()
    pair.compute()
    pair.take()
    pair.kernel.run(until=Nanos(pair.ended["a#1"] + 59 * MILLISECOND))
    assert pair.prefill.kv_blocks_used == 7  # six blocks of ten milliseconds each are under way
    pair.kernel.run(until=Nanos(pair.ended["a#1"] + 61 * MILLISECOND))
    assert pair.prefill.kv_blocks_used == 0
    pair.kernel.run()
    assert pair.decode.computed_tokens == 1


def test_kept_blocks_take_room_of_prefill_worker():
    pair = Pair(prefill_blocks=8)
    pair.compute()
    other = Job(attempt_id=RequestId("b#1"), prompt_tokens=96, answer_tokens=1, keys=tuple(range(11, 17)))
    pair.prefill.submit(other)
    pair.kernel.run(until=Nanos(2 * SECOND))
    assert "b#1" not in pair.ended
    pair.kernel.at(Nanos(2 * SECOND), pair.take)
    pair.kernel.run()
    assert pair.ended["b#1"] == pytest.approx(2.06 * SECOND + 106 * MILLISECOND, rel=1e-6)


def test_unfetched_blocks_are_released_after_lease():
    pair = Pair()
    pair.compute()
    pair.kernel.run(until=Nanos(pair.ended["a#1"] + LEASE - 1))
    assert pair.prefill.kv_blocks_used == 7
    pair.kernel.run(until=Nanos(pair.ended["a#1"] + LEASE))
    assert pair.prefill.kv_blocks_used == 0
    pair.take()
    pair.kernel.run()
    assert pair.decode.computed_tokens == 96  # too late to fetch: it computes everything


def test_full_decode_worker_fetches_later():
    pair = Pair(decode_blocks=8)
    pair.decode.submit(Job(attempt_id=RequestId("b"), prompt_tokens=32, answer_tokens=60, keys=()))
    pair.compute()
    pair.decode.submit(Job(attempt_id=RequestId("c"), prompt_tokens=32, answer_tokens=80, keys=()))
    pair.take()
    assert pair.prefill.kv_blocks_used == 7
    pair.kernel.run()
    assert pair.ended["a#2"] > pair.ended["c"]
    assert pair.decode.computed_tokens == 32 + 32 + 1
    assert pair.prefill.kv_blocks_used == 0


def test_cancelled_decode_releases_blocks():
    pair = Pair(decode_blocks=8)
    pair.decode.submit(Job(attempt_id=RequestId("b"), prompt_tokens=32, answer_tokens=60, keys=()))
    pair.compute()
    pair.decode.submit(Job(attempt_id=RequestId("c"), prompt_tokens=32, answer_tokens=80, keys=()))
    pair.take()
    pair.decode.cancel(RequestId("a#2"))
    pair.handoffs.cancel(RequestId("a#2"))
    assert pair.prefill.kv_blocks_used == 0
    pair.kernel.run()


def test_cached_blocks_are_not_fetched():
    pair = Pair()
    pair.decode.submit(Job(attempt_id=RequestId("b"), prompt_tokens=96, answer_tokens=1, keys=KEYS))
    pair.compute()
    pair.take()
    assert pair.prefill.kv_blocks_used == 0
    pair.kernel.run()
    assert pair.network.moved_bytes == 0
