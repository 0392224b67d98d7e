"""Endpoints in the form that gateways use."""

import pytest

from fleet.gateway.endpoints import endpoint_at
from fleet.router.settings.endpoint_picker import EndpointPickerSettings


@pytest.mark.parametrize(
    ("address", "port", "endpoint"),
    [
        ("10.0.0.1:50060", 0, "10.0.0.1:50060"),
        ("10.0.0.1:50060", 8000, "10.0.0.1:8000"),
        ("10.0.0.1", 8000, "10.0.0.1:8000"),
        ("http://10.0.0.1/v1", 0, "10.0.0.1:80"),
        ("https://10.0.0.1", 0, "10.0.0.1:443"),
        ("[fd00::2]:1", 0, "[fd00::2]:1"),
        ("[FD00:0::2]:1", 0, "[fd00::2]:1"),
        ("10.0.0.1", 0, ""),
        ("worker-1:50060", 0, ""),
        ("unix:/run/w", 8000, ""),
        ("10.0.0.1:99999", 0, ""),
        ("[fd00:", 0, ""),
        ("", 0, ""),
    ],
)
def test_worker_without_ip_address_has_no_endpoint(address, port, endpoint):
    assert endpoint_at(address, port) == endpoint


@pytest.mark.parametrize(
    ("given", "own"),
    [("", ""), ("10.1.1.1:8000", "10.1.1.1:8000"), ("fd00::1:8000", "[fd00::1]:8000"), ("[::1]:80", "[::1]:80")],
)
def test_own_endpoint_is_read_from_pod_addresses(given, own):
    assert EndpointPickerSettings(router_endpoint=given).own_endpoint == own


@pytest.mark.parametrize("given", ["router:8000", "10.1.1.1", ":8000", "10.1.1.1:0", "10.1.1.1:x", "10.1.1.1:8000/x"])
def test_unusable_own_endpoint_is_refused(given):
    with pytest.raises(ValueError, match="must be ip:port"):
        EndpointPickerSettings(router_endpoint=given)
