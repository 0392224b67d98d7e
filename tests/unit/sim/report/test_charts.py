"""Charts as SVG: their geometry, and that names are escaped."""

import re
from itertools import pairwise

import pytest

from fleet.sim.report.charts import CHARACTER, WIDTH, ChartLine, LimitMark, chart, number, thinned


def drawn(*points, **options):
    return chart("title", "x", "y", [ChartLine(name="line", points=points)], **options)


def pixels(svg):
    [path] = re.findall(r'<polyline class="line line-0" points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in path.split()]


def test_points_lie_at_their_values():
    low, middle, high = pixels(drawn((0, 0), (5, 10), (10, 20)))

    assert low[0] < middle[0] < high[0]
    assert low[1] > middle[1] > high[1]
    assert middle == pytest.approx(((low[0] + high[0]) / 2, (low[1] + high[1]) / 2), abs=0.1)


def test_x_axis_can_be_logarithmic():
    one, ten, hundred = pixels(drawn((1, 0), (10, 1), (100, 2), log_x=True))

    assert ten[0] - one[0] == pytest.approx(hundred[0] - ten[0], abs=0.1)


def test_y_axis_can_be_logarithmic():
    one, ten, hundred = pixels(drawn((1, 1), (2, 10), (3, 100), (4, 0), log_y=True))

    assert one[1] - ten[1] == pytest.approx(ten[1] - hundred[1], abs=0.1)


@pytest.mark.parametrize("points", [[(2.1e7, 1), (4e9, 2)], [(1e5, 1), (9e7, 2)], [(0.001, 1), (0.2, 2)]])
def test_axis_labels_never_overlap(points):
    found = re.findall(r'<text x="([\d.]+)" y="269.0" class="middle">([^<]+)<', drawn(*points, log_x=True))
    spans = [(float(at) - 3.2 * len(said), float(at) + 3.2 * len(said)) for at, said in found]

    assert len(spans) >= 2
    assert all(left[1] < right[0] for left, right in pairwise(spans))


def test_table_contains_every_point():
    svg = drawn((0, 0.25), (1, 1.0), shares=True)

    assert svg.count("<circle") == svg.count("<tbody>") * 2 == svg.count("<tr>") - 1
    assert "<td>25 %</td>" in svg
    assert "line: 100 % at 1</title>" in svg
    assert 'aria-label="title: y against x; line from 25 % to 100 %, 100 % at most"' in svg


@pytest.mark.parametrize("points", [[], [(0, 5)], [(1, 0), (2, 0)], [(0, -1), (3, 1e-9)], [(1e9, 1e12), (2e9, 3e12)]])
@pytest.mark.parametrize("log_x", [False, True])
def test_any_numbers_can_be_drawn(points, log_x):
    svg = drawn(
        *points, log_x=log_x, marks=[LimitMark(at=7, name="limit"), LimitMark(at=0.5, name="level", upright=False)]
    )

    assert "nan" not in svg.lower().replace("nothing", "")
    assert ("nothing to draw" in svg) == (not [x for x, _ in points if x > 0 or not log_x])


@pytest.mark.parametrize("at", [0, 3, 9, 10])
def test_limit_name_stays_within_chart(at):
    svg = drawn((0, 0), (10, 1), marks=[LimitMark(at=at, name="a name without an end " * 9)])
    [(left, kind, said)] = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="((?:end )?halo)">([^<]+)<', svg)
    begin = float(left) - (CHARACTER * len(said) if kind == "end halo" else 0)

    assert said.endswith("…")
    assert 0 < begin < begin + CHARACTER * len(said) < WIDTH


def test_names_are_escaped():
    hostile = "<script>\"'&"
    svg = chart(
        hostile, hostile, hostile, [ChartLine(name=hostile, points=[(1, 1)])] * 2, marks=[LimitMark(at=1, name=hostile)]
    )

    assert "<script" not in svg
    assert svg.count("&lt;script&gt;") > 6


def test_thinning_keeps_ends_of_distribution():
    points = [(each, each / 1024) for each in range(1025)]

    kept = thinned(points, 0.125)

    assert kept == points[::128]
    assert thinned(points[:100], 0.125) == [points[0], points[99]]
    assert thinned(points[:1], 0.125) == points[:1]


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0"), (0.0123, "0.0123"), (1.5, "1.5"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_numbers_have_three_digits(value, said):
    assert number(value) == said


def test_whole_numbers_have_no_labels_between_them():
    svg = drawn((0, 0), (1, 2), whole=True)

    labels = re.findall(r'<text x="56.0" y="[\d.]+" class="end">([^<]+)<', svg)
    assert labels == ["0", "1", "2"]


def test_name_of_limit_is_drawn_above_the_lines():
    svg = drawn((0, 1.0), (1, 0.97), shares=True, marks=[LimitMark(at=0.97, name="goal", upright=False)])

    assert svg.index("<polyline") < svg.index(">goal<")
