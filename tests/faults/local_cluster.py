"""Experiments with a cluster of `fleet up`: faults of its supervisor and of its planner, which are on no path of a request."""

from pathlib import Path

from tests.faults.matrix import Cell, Component, MatrixFault


class LocalExperiment:
    def __init__(self, folder: Path, component: Component, fault: MatrixFault):
        raise NotImplementedError

    def run(self) -> list[Cell]:
        raise NotImplementedError
