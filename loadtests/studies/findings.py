"""Results of a study: tables, and findings that can be checked."""

from collections.abc import Sequence

from msgspec import Struct

Cell = str | float | int


class StudyFinding(Struct, frozen=True, kw_only=True):
    """One finding: a figure, and the range that contained it when the study was written."""

    claim: str
    figure: float
    low: float = float("-inf")
    high: float = float("inf")
    target: str = ""
    """Target of the figure; empty: none."""

    met: bool | None = None
    """True if the target is met; None if there is no target."""

    @property
    def holds(self) -> bool:
        return self.low <= self.figure <= self.high

    def line(self) -> str:
        target = "" if self.met is None else f"  (target {self.target}: {'met' if self.met else 'missed'})"
        expected = f"{_bound(self.low)} … {_bound(self.high)}"
        return f"{'holds' if self.holds else 'FAILS'}  {self.figure:8.3f} in {expected:>15}  {self.claim}{target}"


def _bound(value: float) -> str:
    return "" if value in (float("inf"), float("-inf")) else f"{value:g}"


class StudyTable(Struct, frozen=True, kw_only=True):
    """A table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def lines(self) -> list[str]:
        """Format the table for a terminal: the first column is aligned to the left, all others to the right."""
        cells = [self.columns, *(tuple(_shown(cell) for cell in row) for row in self.rows)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(self.columns))]
        shown = [
            "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in pairs).rstrip()
            for pairs in (list(enumerate(zip(row, widths, strict=True))) for row in cells)
        ]
        return [self.title, *shown]


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 100 else f"{cell:,.0f}"
    return str(cell)


class StudyReport(Struct, frozen=True, kw_only=True):
    """All results of a study."""

    study: str
    tables: tuple[StudyTable, ...]
    findings: tuple[StudyFinding, ...]
    cpu_seconds: float | None = None  # None: unknown, because other processes ran the cases

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)

    def lines(self) -> list[str]:
        lines: list[str] = []
        for table in self.tables:
            lines += [*table.lines(), ""]
        return [*lines, *(finding.line() for finding in self.findings)]
