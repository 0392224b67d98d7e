from fleet.core import installation
from fleet.core.installation import install_command


def test_make_is_named_only_where_there_is_a_makefile(tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    assert install_command("vllm") == "pip install 'fleet-serving[vllm]'"

    (tmp_path / "Makefile").touch()
    assert install_command("vllm") == "make install"
