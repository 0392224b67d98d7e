"""Output files: a file is either complete, or keeps its earlier content."""

from pathlib import Path

import pytest

from fleet.cli.console.files import whole_file
from fleet.core.errors import ConfigurationRefused


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(file, "--json") as path:  # noqa: PT012 - the block is left by an exception
        path.write_text("half")
        assert file.read_text() == "before"
        raise KeyboardInterrupt
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    with whole_file(file, "--json") as path:
        path.write_text("all")
    assert file.read_text() == "all"
    assert list(tmp_path.iterdir()) == [file]


def test_unwritable_output_is_refused_with_its_option(tmp_path):
    for path, cause in ((tmp_path / "no" / "file", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationRefused, match=f"--report: {path}: {cause}"), whole_file(path, "--report"):
            pass


def test_a_pipe_is_written_to_directly():
    with whole_file(Path("/dev/null"), "--json") as path:
        path.write_text("gone")
    assert path.is_char_device()
