"""Tests of the simulator's report in a real browser: its drawing, its texts, and hostile names, which do nothing."""

import json

import pytest

from fleet.sim.experiments.load_curve import load_curve
from fleet.sim.report.page import write_report
from fleet.sim.results.history import History
from fleet.sim.run_plan import run_scenario
from fleet.sim.scenario import read_scenario
from tests.support.servers.browser import ABSENT, CHROMIUM, Browser, BrowserPage
from tests.support.sim.model_configs import LLAMA_8B

pytestmark = [pytest.mark.integration, pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)]

SCENARIO = """
model = {model}
[workload]
kind = "drawn"
requests = 160
rate = 4.0
prompt_tokens = 2000
output_tokens = 100
prefixes = 4
prefix_tokens = 1024
[[pools]]
name = {prefill}
role = "prefill"
gpu = "h100"
gpus = 2
[[pools]]
name = {decode}
role = "decode"
gpu = "l40s"
gpus = 2
[[faults]]
kind = "worker"
at_seconds = 20
worker = {victim}
[engine]
start_seconds = 5
[slo]
ttft_ms = 300
tpot_ms = 40
"""
HOSTILE = (
    "<script>document.title='owned'</script>",
    """"><img src=x onerror="document.title='owned'">""",
    "</style></title></svg></pre><script>alert(1)</script>",
)
LOADS = (0.5, 4.0)

TEXTS = """[...document.querySelectorAll('h1, h2, p, li, th, td, figcaption, summary, pre, svg text')]
    .filter(each => each.textContent.trim() && each.getClientRects().length)"""

CONTRASTS = """(() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = numbers(colour).map(each => each / 255).map(
            each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const ground = each => {
        for (; each; each = each.parentElement) {
            const colour = getComputedStyle(each).backgroundColor;
            if ((numbers(colour)[3] ?? 1) > 0) return colour }
        return 'rgb(255, 255, 255)' };
    const ratio = (each, colour) => {
        const [low, high] = [light(colour), light(ground(each))].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05) };
    return { words: TEXTS.map(each => ratio(each, getComputedStyle(each)[each.closest('svg') ? 'fill' : 'color'])),
        lines: [...document.querySelectorAll('.line')].map(each => ratio(each, getComputedStyle(each).stroke)) }
})()""".replace("TEXTS", TEXTS)

OVERLAPS = """[...document.querySelectorAll('.chart > svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(each => [each.textContent, each.getBoundingClientRect()]);
    return boxes.flatMap(([one, a], index) => boxes.slice(index + 1).filter(([_, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3
    ).map(([other]) => [svg.ariaLabel.split(':')[0], one, other])) })"""

BEYOND = """[...document.querySelectorAll('.chart > svg')].flatMap(svg => {
    const edge = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(each => {
        const box = each.getBoundingClientRect();
        return box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1
    }).map(each => each.textContent) })"""

CHARTS = """Object.fromEntries([...document.querySelectorAll('figure.chart')].map(figure => {
    const box = figure.querySelector('svg[role=img]').getBoundingClientRect();
    const lines = [...figure.querySelectorAll(':scope > svg polyline')].map(line => [...line.points].map(each => [each.x, each.y]));
    const dots = [...figure.querySelectorAll('circle')].length;
    const cells = [...figure.querySelectorAll('tbody td:not(:first-child)')].filter(each => each.textContent).length;
    return [figure.querySelector('figcaption').firstChild.textContent, { width: box.width, height: box.height, lines, dots, cells }]
}))"""


class Report:
    """A page and the run that it shows."""

    def __init__(
        self, folder, *, model="model.json", prefill="prefill", decode="decode", name="a scenario", loads=LOADS
    ):
        (folder / model).write_text(json.dumps(LLAMA_8B))
        quoted = {"model": model, "prefill": prefill, "decode": decode, "victim": f"{decode}-0"}
        file = folder / "scenario.toml"
        file.write_text(SCENARIO.format(**{key: json.dumps(value) for key, value in quoted.items()}))
        scenario = read_scenario(file)
        history = History(scenario.slo)
        self.run = run_scenario(scenario, folder, on_end=history.add)
        self.windows = history.windows()
        self.path = folder / "report.html"
        self.curve = load_curve(scenario, folder, loads)
        with self.path.open("w", encoding="utf-8") as page:
            write_report(page, name, scenario, self.run, windows=self.windows, curve=self.curve)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return Report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(browser, report):
    return BrowserPage(browser, report.path)


def test_every_chart_is_drawn_with_all_its_points(page, report):
    charts = page.ask(CHARTS)
    points = {title: [len(line) for line in chart["lines"]] for title, chart in charts.items()}
    looks, arrived = len(report.run.timeline), len(report.windows)

    assert points["Attainment"] == [len(report.curve)]
    assert points["Goodput"] == points["Time to the first token and per token, p90"] == [len(report.curve)] * 2
    assert points["Arrivals and answers"] == [arrived - 1, looks]
    assert points["Requests by where they are"] == [looks] * 3
    assert points["KV memory held by requests"] == points["Workers that are up"] == [looks] * 2
    assert points["Time to the first token"][0] > 50
    assert points["Time per token after it"][0] > 10
    assert {"Cost", "Prompt tokens from caches, by arrival", "Good requests, by arrival"} <= charts.keys()
    for title, chart in charts.items():
        assert chart["width"] > 300, title
        assert chart["height"] > 150, title
        assert sum(map(len, chart["lines"])) == chart["dots"] == chart["cells"], title
        assert all(0 <= x <= 560 and 0 <= y <= 300 for line in chart["lines"] for x, y in line), title


def test_a_distribution_rises_from_left_to_right(page):
    [line] = page.ask(CHARTS)["Time to the first token"]["lines"]

    assert line == sorted(line, key=lambda point: (point[0], -point[1]))
    assert line[0][1] > line[-1][1]


def test_page_requests_nothing_and_logs_nothing(page):
    assert page.asked_for == []
    assert page.complaints == []


def test_screen_readers_get_a_text_for_each_chart(page):
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in ("image", "img")]

    assert len(named) == page.ask("document.querySelectorAll('figure.chart').length")
    assert any(name.startswith("Attainment: good requests against requests a second; good from ") for name in named)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_have_enough_contrast(browser, report, dark):
    """Require the contrasts of the Web Content Accessibility Guidelines (AA): 4.5 for text, 3 for graphics."""
    found = BrowserPage(browser, report.path, dark=dark).ask(CONTRASTS)

    assert len(found["words"]) > 100
    assert min(found["words"]) >= 4.5
    assert min(found["lines"]) >= 3


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overlaps_or_leaves_the_page(browser, report, width):
    page = BrowserPage(browser, report.path, width=width)

    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.ask(OVERLAPS) == page.ask(BEYOND) == []


def test_hostile_names_stay_text(browser, tmp_path):
    script, image, closing = HOSTILE
    folder = tmp_path / "reports"
    folder.mkdir()
    model = image.replace("/", "")
    page = BrowserPage(
        browser, Report(folder, model=model, prefill=script, decode=closing, name=closing, loads=()).path
    )

    assert page.ask("document.title").startswith(closing)
    assert page.ask("document.querySelector('h1').textContent") == closing
    assert page.ask("document.querySelectorAll('script, img, style ~ style').length") == 0
    assert page.ask("document.body.textContent").count(script) > 3
    assert page.asked_for == []
    assert page.complaints == []
    assert page.ask(BEYOND) == []
    assert len(page.ask(CHARTS)) >= 10
