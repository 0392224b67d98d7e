import pytest

from kvstore.net.addresses import host_port, is_plain_hop, unix_path
from kvstore.service.settings import StoreSettings
from kvstore.tiers.peer.settings import PeerSettings


@pytest.mark.parametrize(
    ("address", "path"), [("unix:/run/kv", "/run/kv"), ("unix:///run/kv", "/run/kv"), ("unix:kv", "kv"), ("host:1", "")]
)
def test_both_unix_address_forms_give_the_same_path(address, path):
    assert unix_path(address) == path


@pytest.mark.parametrize(
    ("address", "host", "port"), [("host:0", "host", 0), ("10.0.0.1:65535", "10.0.0.1", 65535), ("[::1]:7", "::1", 7)]
)
def test_ipv6_host_is_returned_without_brackets(address, host, port):
    assert host_port(address) == (host, port)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://10.0.0.1:8000", True),
        ("http://gpu-0/v1", True),
        ("http://unix:8000", True),
        ("http://[fd00::1]:8000", True),
        ("https://10.0.0.1:8000", False),
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost", False),
    ],
)
def test_only_http_to_other_hosts_is_a_plain_hop(url, plain):
    assert is_plain_hop(url) == plain


@pytest.mark.parametrize("address", ["", "host", ":7", "host:", "host:65536", "host:-1", "host:7x", "unix:"])
def test_invalid_address_error_names_the_setting(address):
    with pytest.raises(ValueError, match=r"^listen\[1\]: .*neither unix:/path nor host:port"):
        StoreSettings(store_id="s", listen=("unix:/run/kv", address))
    with pytest.raises(ValueError, match=r"^peers\[1\]: .*neither unix:/path nor host:port"):
        PeerSettings(peers=("unix:/run/kv", address))


@pytest.mark.parametrize("field", ["data_listen", "metrics_listen"])
def test_unix_address_is_refused_for_data_and_metrics(field):
    with pytest.raises(ValueError, match=rf"^{field}: "):
        StoreSettings(store_id="s", listen=("unix:/run/kv",), **{field: "unix:/run/other"})
