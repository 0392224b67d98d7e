"""Tests of tracing in a process."""

from importlib.metadata import Distribution, PackageNotFoundError

from fleet.tracing.process import open_tracing
from kvstore.protocol.versions import DISTRIBUTION, own_protocols
from kvstore.tracing.settings import TracingSettings


def test_program_that_is_not_installed_is_traced_all_the_same(monkeypatch):
    find = Distribution.from_name

    def without_fleet(name: str) -> Distribution:
        if name == DISTRIBUTION:
            raise PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(Distribution, "from_name", without_fleet)
    own_protocols.cache_clear()
    try:
        assert not own_protocols().product
        with open_tracing(TracingSettings(endpoint="http://127.0.0.1:1"), "fleet-test", "one") as exporter:
            assert exporter is not None
    finally:
        own_protocols.cache_clear()
