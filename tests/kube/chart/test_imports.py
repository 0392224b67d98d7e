"""Imports: the API server accepts the deployments that `fleet kube import` makes from those of other projects."""

from pathlib import Path

import pytest
import yaml

from operators.imports.detection import imported
from tests.kube.chart.test_crds import kinds, path

__all__ = ["kinds", "path"]  # fixtures

FILES = sorted((Path(__file__).parents[2] / "unit" / "operators" / "imports").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_imported_deployment_is_accepted_by_the_server(api, path, file):
    for each in imported(list(yaml.safe_load_all(file.read_text()))).objects:
        each["metadata"].pop("namespace", None)
        api.post(path("disaggdeployments"), each, fieldValidation="Strict").expect(201)
