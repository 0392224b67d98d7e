"""Charts: draws line charts as SVG for HTML pages that load no scripts, fonts or other resources.

Rules:

1. Names are escaped by `Markup`, so they cannot contain HTML.
2. Colours and dashes are CSS classes (`line-0` …) that the page defines for light and dark backgrounds. Each line has a colour and
   dashes of its own.
3. The values of every point are shown in its tooltip (`title`), and in a table below the chart.
4. Labels of an axis never overlap: a label that would overlap another one is left out.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor, log10

from markupsafe import Markup
from msgspec import Struct

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 16, 46
TICKS = 5
LINES = 6
"""Maximum number of lines of one chart, because people cannot tell more colours apart."""

FEW, DENSE = 12, 210
"""Lines with at most `FEW` points get a mark at each point. Lines with more than `DENSE` points are drawn thinner."""

CHARACTER = 6.4  # assumed width of one character in a label, in pixels; real characters are not wider
ROUND: tuple[float, ...] = (1, 2, 5, 10)


class ChartLine(Struct, frozen=True, kw_only=True):
    name: str
    points: Points


class LimitMark(Struct, frozen=True, kw_only=True):
    """A straight line across the chart that shows a limit, with its name."""

    at: float
    name: str
    # True: a vertical line at a value of the x axis; False: a horizontal line at a value of the y axis
    upright: bool = True


class _Scale:
    """Converts values of one axis to pixels, on a linear or logarithmic scale."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool, least: float = 0.0):
        self._log, self._least = logarithmic, least
        if logarithmic:
            low, high = log10(low), log10(high)
        if high <= low:
            high = low + 1.0
        self._low, self._high, self._start, self._end = low, high, start, end

    def pixel(self, value: float) -> float:
        if self._log:
            value = log10(max(value, 10**self._low))
        share = (value - self._low) / (self._high - self._low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if not self._log:
            step = _step(self._high - self._low, self._least)
            first = ceil(self._low / step - 1e-9)
            return [number * step for number in range(first, floor(self._high / step + 1e-9) + 1)]
        powers = range(floor(self._low), ceil(self._high) + 1)
        few = self._high - self._low <= 2.5
        values = [factor * 10.0**power for power in powers for factor in (ROUND[:3] if few else ROUND[:1])]
        return [value for value in values if self._low - 1e-9 <= log10(value) <= self._high + 1e-9]


def chart(
    title: str,
    x: str,
    y: str,
    lines: Sequence[ChartLine],
    *,
    log_x: bool = False,
    log_y: bool = False,
    shares: bool = False,
    whole: bool = False,
    marks: Sequence[LimitMark] = (),
) -> Markup:
    """Return a chart as HTML, with its table and, if it has several lines, a legend.

    Empty lines are left out; at most `LINES` others are allowed. If an axis is logarithmic, points with a value of 0 or less on it are left
    out.
    If `shares` is true, y runs from 0 to 1 and is written in percent. If `whole` is true, the values of y are whole numbers, and so are the
    labels of its axis.
    """
    drawn = [
        ChartLine(name=line.name, points=points)
        for line in lines
        if (points := [(x, y) for x, y in line.points if (x > 0 or not log_x) and (y > 0 or not log_y)])
    ]
    assert len(drawn) <= LINES, [line.name for line in drawn]
    if not drawn:
        return Markup('<figure class="chart"><figcaption>{}</figcaption><p>nothing to draw</p></figure>').format(title)
    across, up = _scales(drawn, marks, log_x=log_x, log_y=log_y, shares=shares, least=1.0 if whole else 0.0)
    text_of = _percent if shares else number
    parts = [_upright_grid(across), _level_grid(up, text_of), _axis_names(x, y)]
    limits = [_mark(mark, place, across, up) for place, mark in enumerate(marks)]
    parts += [line for line, _ in limits]
    parts += [_line(index, line, across, up, text_of) for index, line in enumerate(drawn)]
    parts += [name for _, name in limits]  # after the lines, which would strike the names through
    return Markup(
        '<figure class="chart"><figcaption>{title}{legend}</figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{parts}</svg>{table}</figure>'
    ).format(
        title=title,
        legend=_legend(drawn) if len(drawn) > 1 else "",
        width=WIDTH,
        height=HEIGHT,
        label=f"{title}: {y} against {x}; {_in_words(drawn, text_of)}",
        parts=Markup("").join(parts),
        table=_table(x, drawn, text_of),
    )


def thinned(points: Points, rise: float) -> Points:
    """Return fewer points of a rising curve: the first one, the last one, and some between them.

    A point between them is kept if it is at least `rise` above the point that was kept before it.
    """
    kept: list[tuple[float, float]] = []
    for point, after in zip(points, [*points[1:], None], strict=True):
        if not kept or after is None or point[1] - kept[-1][1] >= rise:
            kept.append(point)
    return kept


def number(value: float) -> str:
    """Format a number with at most three significant digits. If it has more digits before the decimal point, write all of these."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share * 100:.4g} %"


def _scales(
    lines: Sequence[ChartLine], marks: Sequence[LimitMark], *, log_x: bool, log_y: bool, shares: bool, least: float
) -> tuple[_Scale, _Scale]:
    xs = [point[0] for line in lines for point in line.points] + [mark.at for mark in marks if mark.upright]
    ys = [point[1] for line in lines for point in line.points] + [mark.at for mark in marks if not mark.upright]
    low, high = min(xs), max(xs)
    if log_x:
        low, high = _round_down(low), _round_up(high)
    bottom, top = min(0.0, *ys), 1.0 if shares else _full(max(ys), least)
    if log_y:
        bottom, top = _round_down(min(ys)), _round_up(max(ys))
    return (
        _Scale(low, high, LEFT, WIDTH - RIGHT, logarithmic=log_x),
        _Scale(bottom, top, HEIGHT - BOTTOM, TOP, logarithmic=log_y, least=least),
    )


def _full(value: float, least: float) -> float:
    """Return the value at the end of an axis: the given value, rounded up so that a grid line is at the end."""
    if value <= 0:
        return 1.0
    step = _step(value, least)
    return ceil(value / step - 1e-9) * step


def _step(length: float, least: float) -> float:
    """Return the distance between the grid lines of an axis of this length. It is at least `least`."""
    return max(_round_up(length / TICKS), least)


def _upright_grid(across: _Scale) -> Markup:
    parts, free = [], float(LEFT - CHARACTER * 4)
    for tick in across.ticks():
        at, label = across.pixel(tick), number(tick)
        parts.append(
            Markup('<line x1="{at}" x2="{at}" y1="{top}" y2="{bottom}" class="grid"/>').format(
                at=_pixels(at), top=TOP, bottom=HEIGHT - BOTTOM
            )
        )
        half = len(label) * CHARACTER / 2
        if at - half > free and at + half <= WIDTH:
            parts.append(_text(at, HEIGHT - BOTTOM + 15, label, "middle"))
            free = at + half + CHARACTER
    return Markup("").join(parts)


def _level_grid(up: _Scale, text_of: Callable[[float], str]) -> Markup:
    parts = []
    for tick in up.ticks():
        at = up.pixel(tick)
        parts.append(
            Markup('<line x1="{left}" x2="{right}" y1="{at}" y2="{at}" class="grid"/>').format(
                left=LEFT, right=WIDTH - RIGHT, at=_pixels(at)
            )
        )
        parts.append(_text(LEFT - 6, at + 4, text_of(tick), "end"))
    return Markup("").join(parts)


def _axis_names(x: str, y: str) -> Markup:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = Markup('<text x="13" y="{at}" class="middle" transform="rotate(-90 13 {at})">{name}</text>')
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x, "middle") + turned.format(at=_pixels(middle), name=y)


def _mark(mark: LimitMark, place: int, across: _Scale, up: _Scale) -> tuple[Markup, Markup]:
    """Draw the line of a limit, and its name.

    The name of a vertical line is on its right or, if it does not fit there, on the side that has more space. The names of several vertical
    lines are placed one above the other.
    """
    line = Markup('<line x1="{}" x2="{}" y1="{}" y2="{}" class="mark"/>')
    if not mark.upright:
        at = up.pixel(mark.at)
        drawn = line.format(LEFT, WIDTH - RIGHT, _pixels(at), _pixels(at))
        return drawn, _text(WIDTH - RIGHT - 2, at - 4, mark.name, "end halo")
    at, height = across.pixel(mark.at), HEIGHT - BOTTOM - 8 - 14 * place
    drawn = line.format(_pixels(at), _pixels(at), TOP, HEIGHT - BOTTOM)
    # numbers of characters that fit into the chart to the left and to the right of the line
    left, right = (int(room / CHARACTER) for room in (at - LEFT, WIDTH - RIGHT - at))
    if len(mark.name) > right and left > right:
        return drawn, _text(at - 4, height, _shortened(mark.name, left), "end halo")
    return drawn, _text(at + 4, height, _shortened(mark.name, right), "halo")


def _line(index: int, line: ChartLine, across: _Scale, up: _Scale, text_of: Callable[[float], str]) -> Markup:
    pixels = [(_pixels(across.pixel(x)), _pixels(up.pixel(y))) for x, y in line.points]
    path = Markup('<polyline class="line line-{}{}" points="{}"/>').format(
        index, " dense" if len(pixels) > DENSE else "", " ".join(f"{left},{top}" for left, top in pixels)
    )
    shown = " shown" if len(pixels) <= FEW else ""
    dot = Markup('<circle class="dot dot-{}{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
    return path + Markup("").join(
        dot.format(index, shown, left, top, 3 if shown else 5, f"{line.name}: {text_of(y)} at {number(x)}")
        for (left, top), (x, y) in zip(pixels, line.points, strict=True)
    )


def _legend(lines: Sequence[ChartLine]) -> Markup:
    entry = Markup(
        '<li><svg viewBox="0 0 26 8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" class="line line-{}"/></svg>'
        "{}</li>"
    )
    entries = Markup("").join(entry.format(index, line.name) for index, line in enumerate(lines))
    return Markup('<ul class="legend">{}</ul>').format(entries)


def _table(x: str, lines: Sequence[ChartLine], text_of: Callable[[float], str]) -> Markup:
    """Return a table of all points, with a row for each value of x and a column for each line."""
    columns = [dict(line.points) for line in lines]
    head = Markup("").join(
        Markup('<th scope="col">{}</th>').format(name) for name in (x, *(line.name for line in lines))
    )
    rows = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup("<td>{}</td>").format(cell)
                for cell in (number(at), *(text_of(column[at]) if at in column else "" for column in columns))
            )
        )
        for at in sorted({at for column in columns for at in column})
    )
    return Markup(
        "<details><summary>Figures</summary><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></details>"
    ).format(head, rows)


def _in_words(lines: Sequence[ChartLine], text_of: Callable[[float], str]) -> str:
    """Describe each line in words, for screen readers."""
    return "; ".join(
        f"{line.name} from {text_of(line.points[0][1])} to {text_of(line.points[-1][1])}, "
        f"{text_of(max(y for _, y in line.points))} at most"
        for line in lines
    )


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(_pixels(x), _pixels(y), kind, text)


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: max(0, most - 1)]}…"


def _pixels(value: float) -> str:
    return f"{value:.1f}"


def _round_up(value: float) -> float:
    """Round a value up to the next number that is 1, 2 or 5 times a power of ten."""
    unit: float = 10.0 ** floor(log10(value))
    return next(factor * unit for factor in ROUND if factor * unit >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    unit: float = 10.0 ** floor(log10(value))
    return next(factor * unit for factor in reversed(ROUND[:3]) if factor * unit <= value * (1 + 1e-9))
