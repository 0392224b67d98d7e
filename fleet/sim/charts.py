"""Line charts as SVG, for pages that must open anywhere: no script, no font, nothing fetched."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from msgspec import Struct

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
COLOURS = ("#1f6f8b", "#c8553d", "#588b3b", "#7d5ba6")  # told apart by colour-blind readers too
TICKS = 5


class Line(Struct, frozen=True, kw_only=True):
    name: str
    points: Points


class Mark(Struct, frozen=True, kw_only=True):
    """A vertical line, as for a promised limit."""

    at: float
    name: str


class _Scale:
    """Values of one axis on its way to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool):
        self._log = logarithmic
        if logarithmic:
            low, high = floor(log10(low)), max(ceil(log10(high)), floor(log10(low)) + 1)
        elif high <= low:
            high = low + 1.0
        self._low, self._high, self._start, self._end = low, high, start, end

    def pixel(self, value: float) -> float:
        if self._log:
            value = log10(max(value, 10**self._low))
        share = (value - self._low) / (self._high - self._low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            return [10.0**power for power in range(int(self._low), int(self._high) + 1)]
        step = _round_step((self._high - self._low) / TICKS)
        first = ceil(self._low / step)
        return [number * step for number in range(first, floor(self._high / step) + 1)]


def chart(title: str, x: str, y: str, lines: Sequence[Line], *, log_x: bool = False, mark: Mark | None = None) -> str:
    """One chart.

    Args:
        title: Above it.
        x: What is to the right, with its unit.
        y: What goes up, with its unit.
        lines: At most as many as there are colours; empty ones are left out.
        log_x: Whether distances to the right are powers of ten; values must then be above zero.
        mark: A limit on the x axis.
    """
    drawn = [line for line in lines if line.points]
    assert len(drawn) <= len(COLOURS), [line.name for line in drawn]
    if not drawn:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing to draw</p></figure>"
    xs = [point[0] for line in drawn for point in line.points] + ([mark.at] if mark else [])
    ys = [point[1] for line in drawn for point in line.points]
    if log_x:
        xs = [value for value in xs if value > 0] or [1.0]
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, logarithmic=log_x)
    up = _Scale(min(0.0, *ys), max(ys), HEIGHT - BOTTOM, TOP, logarithmic=False)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += [_grid(across.pixel(tick), _number(tick)) for tick in across.ticks()]
    parts += [_rule(up.pixel(tick), _number(tick)) for tick in up.ticks()]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" class="middle">{escape(x)}</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2}" class="middle" transform="rotate(-90 12 {HEIGHT / 2})">{escape(y)}</text>'
    )
    if mark is not None:
        at = across.pixel(mark.at)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{TOP + 10}">{escape(mark.name)}</text>')
    for line, colour in zip(drawn, COLOURS, strict=False):
        path = " ".join(f"{across.pixel(a):.1f},{up.pixel(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline points="{path}" stroke="{colour}"><title>{escape(line.name)}</title></polyline>')
    parts.append("</svg>")
    legend = "".join(
        f'<span style="color:{colour}">■</span> {escape(line.name)} '
        for line, colour in zip(drawn, COLOURS, strict=False)
    )
    caption = f"{escape(title)}<br><small>{legend if len(drawn) > 1 else ''}</small>"
    return f"<figure><figcaption>{caption}</figcaption>{''.join(parts)}</figure>"


def _grid(at: float, label: str) -> str:
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>'
        f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" class="middle">{label}</text>'
    )


def _rule(at: float, label: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{at + 4:.1f}" class="end">{label}</text>'
    )


def _round_step(step: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    unit = 10.0 ** floor(log10(step))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= step * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"
