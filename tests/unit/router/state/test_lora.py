"""LoRA adapters: which workers serve them, and where requests for them go."""

import pytest
from msgspec import structs

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Phase, Role
from fleet.core.work import KvStored, LoadReport, LoraAdapter
from fleet.router.messages import KvChanged, LoadReported, Reject, WorkerDraining
from fleet.router.placement.candidate_table import IneligibleReason
from fleet.router.placement.wait_or_reject import RejectionCause
from kvstore.block import adapter_salt, chain
from tests.support.builders import BLOCK_TOKENS, MODEL, a_joined_worker, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

ADA, BOB = LoraAdapter(ModelName("ada"), "1"), LoraAdapter(ModelName("bob"), "1")


class Fleet(RouterMachineDriver):
    def join_with(
        self, worker_id: str, *adapters: LoraAdapter, slots: int = 1, role: Role = Role.DECODE, **fields
    ) -> None:
        joined = a_joined_worker(worker_id, role, **fields)
        described = structs.replace(joined.description, adapters=adapters, adapter_slots=slots)
        self.send(structs.replace(joined, description=described))

    def loaded(self, worker_id: str, *names: str) -> None:
        load = LoadReport(running=0, waiting=0, kv_blocks_used=0, adapters=names)
        self.send(LoadReported(worker_id=WorkerId(worker_id), load=load))

    def ask(self, request_id: str, adapter: LoraAdapter | None, **fields) -> list:
        salt = b"" if adapter is None else adapter_salt(adapter.identity)
        return self.send(an_arrival(request_id=request_id, adapter=adapter, salt=salt, **fields))

    def placed(self, request_id: str, adapter: LoraAdapter | None, **fields) -> str:
        return the(Dispatch, self.ask(request_id, adapter, **fields)).worker_id


def test_request_goes_where_its_lora_is_loaded():
    fleet = Fleet()
    for worker_id in ("d1", "d2", "d3"):
        fleet.join_with(worker_id, ADA, BOB)
    fleet.loaded("d2", "ada")
    fleet.loaded("d3", "bob")

    assert {fleet.placed(f"a{number}", ADA) for number in range(8)} == {"d2"}
    assert {fleet.placed(f"b{number}", BOB) for number in range(8)} == {"d3"}


def test_unloaded_lora_goes_to_a_worker_with_a_free_slot():
    fleet = Fleet()
    for worker_id in ("d1", "d2", "d3"):
        fleet.join_with(worker_id, ADA, BOB)
    fleet.loaded("d1", "bob")
    fleet.loaded("d3", "bob")

    work = the(Dispatch, fleet.ask("r1", ADA))

    assert (work.worker_id, work.start.adapter) == ("d2", "ada")
    assert fleet.placed("r2", ADA) == "d2", "before the worker has said that it is loaded"


def test_without_free_slot_any_able_worker_is_used():
    fleet = Fleet()
    fleet.join_with("d1", ADA, BOB)
    fleet.loaded("d1", "bob")

    assert fleet.placed("r1", ADA) == "d1"


def test_full_batches_make_another_worker_load_the_lora():
    fleet = Fleet()
    fleet.join_with("d1", ADA, max_running=2)
    fleet.join_with("d2", ADA, max_running=2)
    fleet.loaded("d1", "ada")

    assert [fleet.placed(f"r{number}", ADA) for number in range(3)] == ["d1", "d1", "d2"]


def test_workers_without_the_lora_are_ineligible():
    fleet = Fleet(("d1", Role.DECODE))
    fleet.join_with("d2", BOB)
    fleet.join_with("d3", LoraAdapter(ADA.name, "2"))
    fleet.join_with("d4", ADA)
    fleet.join_with("d5", ADA)
    fleet.loaded("d5", "ada")

    assert fleet.placed("r1", ADA) == "d5"
    (placed,) = fleet.machine.explain("r1").placements
    assert dict(placed.unfit) == {
        "d1": IneligibleReason.NO_ADAPTER,
        "d2": IneligibleReason.NO_ADAPTER,
        "d3": IneligibleReason.NO_ADAPTER,
        "d4": IneligibleReason.ADAPTER_ELSEWHERE,
    }


def test_unavailable_lora_is_rejected_by_name():
    fleet = Fleet(("d1", Role.DECODE))

    refused = the(Reject, fleet.ask("r1", ADA))

    assert (refused.reason, refused.field) == (Reason.NO_WORKER, "model")
    assert "ada@1" in refused.message
    assert fleet.machine.snapshot().counters.impossible == {RejectionCause.NO_ADAPTER: 1}


def test_request_without_lora_goes_to_any_worker():
    fleet = Fleet()
    fleet.join_with("d1", ADA)
    fleet.join_with("d2")
    fleet.loaded("d1", "ada")

    assert {fleet.placed(f"r{number}", None) for number in range(8)} == {"d1", "d2"}


def test_both_workers_of_a_pair_have_the_lora():
    fleet = Fleet(("p0", Role.PREFILL), ("d0", Role.DECODE))
    fleet.join_with("p1", ADA, role=Role.PREFILL)
    fleet.join_with("p2", ADA, role=Role.PREFILL)
    fleet.join_with("d1", ADA)
    fleet.loaded("p2", "ada")

    work = the(Dispatch, fleet.ask("r1", ADA, tokens=700))

    assert (work.worker_id, work.start.phase, work.start.adapter) == ("p2", Phase.PREFILL, "ada")
    assert fleet.machine.decision("r1").decode == "d1"


def test_lora_blocks_give_no_hit_to_other_models():
    fleet = Fleet()
    fleet.join_with("d1", ADA, BOB, slots=2)
    prompt = a_prompt(100)
    names = tuple(chain(prompt, BLOCK_TOKENS, salt=adapter_salt(ADA.identity)))
    fleet.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(names),)))

    uncached = {}
    for request_id, adapter in (("a", ADA), ("b", BOB), ("c", LoraAdapter(ADA.name, "2")), ("none", None)):
        if adapter is None or adapter in (ADA, BOB):
            fleet.ask(request_id, adapter, tokens=prompt)
            uncached[request_id] = fleet.machine.explain(request_id).placements[0].uncached_tokens

    assert uncached == {"a": 4, "b": 100, "none": 100}


def test_lora_reservations_follow_the_requests():
    fleet = Fleet()
    fleet.join_with("d1", ADA)
    fleet.join_with("d2", ADA)
    work = the(Dispatch, fleet.ask("r1", ADA))
    other = "d2" if work.worker_id == "d1" else "d1"

    fleet.leave(work.worker_id)  # the machine checks its reservations after each event
    fleet.join_with(work.worker_id, ADA)
    assert fleet.placed("r2", ADA) == other

    fleet.send(LoadReported(worker_id=WorkerId(other), load=LoadReport(running=0, waiting=0, kv_blocks_used=0)))


def test_ended_request_frees_its_lora_slot():
    fleet = Fleet()
    fleet.join_with("d1", ADA, BOB)
    fleet.join_with("d2", ADA, BOB)
    work = the(Dispatch, fleet.ask("r1", ADA))

    fleet.step(work, 1, finish=Finish.STOP)

    assert fleet.machine.registry[work.worker_id].adapters_reserved == {}


# Adapters in the list of models.


def cards(fleet: Fleet) -> dict[str, tuple[str, str, int]]:
    return {card.name: (card.parent, card.revision, card.workers) for card in fleet.machine.models()}


def test_loras_are_listed_as_models_of_their_base_model():
    fleet = Fleet()
    fleet.join_with("d1", ADA, BOB)
    fleet.join_with("d2", ADA)
    fleet.join_with("x1", LoraAdapter(ModelName("eve")), model=ModelName("other"))

    assert cards(fleet) == {
        "tiny": ("", "", 2),
        "ada": (MODEL, "1", 2),
        "bob": (MODEL, "1", 1),
        "other": ("", "", 1),
        "eve": ("other", "", 1),
    }


@pytest.mark.parametrize("leaving", ["d1", "d2"])
def test_first_joined_lora_revision_counts(leaving):
    fleet = Fleet()
    fleet.join_with("d1", ADA)
    fleet.join_with("d2", LoraAdapter(ADA.name, "2"))
    assert cards(fleet)["ada"] == (MODEL, "1", 1)

    fleet.leave(leaving)

    assert cards(fleet)["ada"] == (MODEL, "2" if leaving == "d1" else "1", 1)


def test_new_lora_revision_takes_over_after_old_workers_drain():
    fleet = Fleet()
    fleet.join_with("d1", ADA)
    fleet.join_with("d2", LoraAdapter(ADA.name, "2"))

    fleet.send(WorkerDraining(worker_id=WorkerId("d1")))

    assert cards(fleet)["ada"] == (MODEL, "2", 1)


def test_model_hides_a_lora_of_the_same_name():
    fleet = Fleet()
    fleet.join_with("d1", LoraAdapter(ModelName("other")))
    fleet.join_with("x1", model=ModelName("other"))

    assert cards(fleet) == {"tiny": ("", "", 1), "other": ("", "", 1)}
