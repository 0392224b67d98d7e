"""Metrics of several router processes in one answer, because a scrape of their common port reaches only one of them."""

from collections.abc import Iterator, Mapping

LABEL = "router"


def merge_metrics(expositions: Mapping[str, str]) -> str:
    """Return one exposition with all samples, each with a label ``router``; help and type of each metric appear once.

    `expositions` maps the id of a router to the output of its `prometheus_client.generate_latest`.
    """
    described: dict[str, list[str]] = {}  # the lines with help and type, by the name of the metric
    samples: dict[str, list[str]] = {}
    for router, exposition in expositions.items():
        label = f'{LABEL}="{_escaped(router)}"'
        for metric, lines in _metrics(exposition):
            described.setdefault(metric, [line for line in lines if line.startswith("#")])
            samples.setdefault(metric, []).extend(_labelled(line, label) for line in lines if not line.startswith("#"))
    return "".join(f"{line}\n" for metric, lines in described.items() for line in (*lines, *samples[metric]))


def _metrics(exposition: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each metric and its lines, the help line first."""
    for lines in exposition.split("# HELP ")[1:]:
        yield lines.partition(" ")[0], f"# HELP {lines}".splitlines()


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
