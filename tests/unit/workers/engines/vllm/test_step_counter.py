"""Step counter in shared memory; here, its writer and its reader are in one process."""

import pytest

from fleet.core.clock import Nanos
from workers.engines.vllm.step_counter import StepCounter, StepReader, step_file
from workers.ports import Pulse


def pulse_of(reader: StepReader) -> Pulse:
    return reader.pulse(working=True, novel=False, fetch_limit=Nanos(0))


def test_reader_sees_the_counters_steps(tmp_path):
    counter = StepCounter(step_file(tmp_path, 0))
    reader = StepReader(step_file(tmp_path, 0))
    assert pulse_of(reader) == Pulse(steps=0, tokens=0, working=True)

    counter.begin(2048)

    assert pulse_of(reader) == Pulse(steps=1, tokens=2048, working=True)


def test_larger_of_two_overlapping_steps_counts(tmp_path):
    counter = StepCounter(step_file(tmp_path, 0))
    reader = StepReader(step_file(tmp_path, 0))

    for tokens in (2048, 4, 4):
        counter.begin(tokens)
        seen = pulse_of(reader)

    assert seen == Pulse(steps=3, tokens=4, working=True)
    counter.begin(1)
    assert pulse_of(reader).tokens == 4


def test_engine_without_counter_has_no_reader(tmp_path):
    with pytest.raises(FileNotFoundError):
        StepReader(step_file(tmp_path, 1))
