"""Comparison of a metrics page, which a process serves to Prometheus, with the catalogue of metrics."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from kvstore.metric_definitions import MetricDefinition


def differences(page: str, definitions: Iterable[MetricDefinition], *added_labels: str) -> list[str]:
    """Return one line for each metric of the page that differs from its definition in name, type, help text or labels.

    Args:
        page: The page in the Prometheus text format.
        definitions: The definitions of the metrics that the process has.
        added_labels: Labels that samples have besides those of their definitions.
    """
    known = {each.name: each for each in definitions}
    found = []
    for family in text_string_to_metric_families(page):
        if (defined := known.get(family.name)) is None:
            found.append(f"{family.name}: is not in the catalogue")
            continue
        if (family.type, family.documentation) != (defined.type, defined.meaning):
            found.append(
                f"{family.name}: {family.type}, {family.documentation!r}; catalogue: {defined.type}, {defined.meaning!r}"
            )
        labelled = {frozenset(sample.labels) - {"le", *added_labels} for sample in family.samples}
        found += [
            f"{family.name}: has the labels {sorted(labels)}; catalogue: {sorted(defined.labels)}"
            for labels in labelled - {frozenset(defined.labels)}
        ]
    return found
