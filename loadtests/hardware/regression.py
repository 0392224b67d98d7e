"""Hierarchical regression: least squares for coefficients that differ between groups only as far as the measurements demand.

Every coefficient is positive and is fitted as a logarithm: a guess, plus one deviation for each level of grouping (this engine, this
GPU, this model on this GPU, …). The square of a deviation divided by its level's width is added to the loss, so few measurements move
a coefficient little, and many move it completely (ridge regression, or a normal prior). Outliers weigh less (Cauchy). The method is
Gauss-Newton with damping; the same input gives the same output.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP = 1e-4  # difference for the numeric derivative, in logarithms
LONGEST_MOVE = 0.7  # longest move of a coefficient in one iteration: a factor of two
ENOUGH = 3e-4  # the fit ends when an iteration reduces the loss by less than this share
OUTLIER = 2.0  # residuals above this size, in widths, get less weight


class Level(Struct, frozen=True, kw_only=True):
    """One way to group the rows, such as by GPU."""

    name: str
    keys: Sequence[Hashable]  # key of each row
    widths: Mapping[str, float]  # width of each coefficient; a coefficient without a width has no deviations


class FittedCoefficients(Struct, frozen=True, kw_only=True):
    """Result of a fit: the start values, and the fitted deviations of each group."""

    names: tuple[str, ...]
    guess: tuple[float, ...]  # logarithms of the start values, to which deviations are added
    deviations: dict[tuple[str, Hashable], Floats]  # deviation of each coefficient, by level and key
    rows: dict[tuple[str, Hashable], int]  # number of fitted rows of each group, by level and key
    loss: float

    def values(self, keys: Mapping[str, Hashable]) -> dict[str, float]:
        """Return the coefficients for a row with these keys by level; levels that are not named and unknown keys add no deviation."""
        logs = np.array(self.guess)
        for pair in keys.items():
            logs = logs + self.deviations.get(pair, 0.0)
        return {name: float(np.exp(log)) for name, log in zip(self.names, logs, strict=True)}


def fit(
    guess: Mapping[str, float],
    levels: Sequence[Level],
    residuals: Callable[[Floats], Floats],
    rows: NDArray[np.bool_],
    *,
    iterations: int = 20,
) -> FittedCoefficients:
    """Fit coefficients to some of the rows.

    Args:
        guess: Start value of each coefficient.
        levels: Levels of grouping for all rows.
        residuals: Maps logarithms of coefficients, shape [rows, coefficients], to residuals in widths, shape [rows, outputs].
        rows: Rows of the fit; the others are ignored.
        iterations: Maximum number of iterations.
    """
    names = tuple(guess)
    means = np.log([guess[name] for name in names])
    blocks = [_block(level, names, rows) for level in levels]
    which, column, coefficient, widths = _columns(blocks, len(names))
    used = rows[which]
    picked = np.flatnonzero(rows)
    position = np.full(len(rows), -1)
    position[picked] = np.arange(len(picked))
    state = np.zeros(len(widths))

    def logs(deviations: Floats) -> Floats:
        out = np.tile(means, (len(rows), 1))
        np.add.at(out, (which, coefficient), deviations[column])
        return out

    def loss(deviations: Floats) -> float:
        scaled = residuals(logs(deviations))[picked] / OUTLIER
        return float(np.log1p(scaled * scaled).sum() * OUTLIER**2 + ((deviations / widths) ** 2).sum())

    now, damping = loss(state), 0.1
    for _ in range(iterations):
        at = logs(state)
        here = residuals(at)
        weights = 1.0 / (1.0 + (here[picked] / OUTLIER) ** 2)
        matrix = np.diag(1.0 / widths**2)
        slope = state / widths**2
        derivatives = np.stack([_derivative(residuals, at, here, each) for each in range(len(names))], axis=-1)
        for output in range(here.shape[1]):
            dense = np.zeros((len(picked), len(widths)), dtype=np.float32)
            dense[position[which[used]], column[used]] = derivatives[which[used], output, coefficient[used]]
            matrix += (dense * weights[:, output : output + 1].astype(np.float32)).T @ dense
            slope += dense.T @ (weights[:, output] * here[picked, output])
        before = now
        for _ in range(8):
            move = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), slope).clip(-LONGEST_MOVE, LONGEST_MOVE)
            if (after := loss(state - move)) < now:
                state, now, damping = state - move, after, max(damping / 4, 1e-4)
                break
            damping *= 4
        if before - now < ENOUGH * now:
            break
    deviations = {}
    counts = {}
    for block, start in zip(blocks, _starts(blocks), strict=True):
        for index, key in enumerate(block.keys):
            spread = np.zeros(len(names))
            spread[block.coefficients] = state[start + index * len(block.coefficients) :][: len(block.coefficients)]
            deviations[block.level, key] = spread
            counts[block.level, key] = int((block.codes[rows] == index).sum())
    return FittedCoefficients(names=names, guess=tuple(means), deviations=deviations, rows=counts, loss=now)


class _Block(Struct, frozen=True, kw_only=True):
    """The unknowns of one level: one deviation for each key and each coefficient that differs between groups."""

    level: str
    keys: list[Hashable]
    codes: NDArray[np.int64]  # for each row, the index of its key; -1: no fitted row has this key
    coefficients: NDArray[np.int64]
    widths: Floats


def _block(level: Level, names: Sequence[str], rows: NDArray[np.bool_]) -> _Block:
    keys = list(dict.fromkeys(key for key, used in zip(level.keys, rows, strict=True) if used))
    index = {key: code for code, key in enumerate(keys)}
    differing = [position for position, name in enumerate(names) if name in level.widths]
    return _Block(
        level=level.name,
        keys=keys,
        codes=np.array([index.get(key, -1) for key in level.keys]),
        coefficients=np.array(differing),
        widths=np.array([level.widths[names[position]] for position in differing]),
    )


def _starts(blocks: Sequence[_Block]) -> list[int]:
    sizes = [len(block.keys) * len(block.coefficients) for block in blocks]
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _columns(
    blocks: Sequence[_Block], coefficients: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return four arrays: rows, unknowns, coefficients, and the width of each unknown.

    The first three are parallel: entry i says that unknown i is added to coefficient i of row i.
    """
    which, column, coefficient, widths = [], [], [], []
    for block, start in zip(blocks, _starts(blocks), strict=True):
        assert block.coefficients.max() < coefficients
        known = np.flatnonzero(block.codes >= 0)
        each = len(block.coefficients)
        which.append(np.repeat(known, each))
        column.append((start + block.codes[known, None] * each + np.arange(each)).ravel())
        coefficient.append(np.tile(block.coefficients, len(known)))
        widths.append(np.tile(block.widths, len(block.keys)))
    return np.concatenate(which), np.concatenate(column), np.concatenate(coefficient), np.concatenate(widths)


def _derivative(residuals: Callable[[Floats], Floats], at: Floats, here: Floats, coefficient: int) -> Floats:
    moved = at.copy()
    moved[:, coefficient] += STEP
    return (residuals(moved) - here) / STEP
