"""Phases of a start: they are reported only to a caller that asked for them."""

import asyncio

from workers.start_phase import StartPhase, note_phase, telling_phases


def test_phase_outside_a_context_goes_nowhere():
    told: list[StartPhase] = []
    with telling_phases(told.append):
        pass

    note_phase(StartPhase.LOAD)

    assert told == []


async def test_tasks_and_threads_of_the_context_tell_their_phases():
    told: list[StartPhase] = []

    async def load() -> None:
        note_phase(StartPhase.LOAD)
        await asyncio.to_thread(note_phase, StartPhase.WARM_UP)

    with telling_phases(told.append):
        note_phase(StartPhase.FETCH)
        await asyncio.create_task(load())

    assert told == [StartPhase.FETCH, StartPhase.LOAD, StartPhase.WARM_UP]
