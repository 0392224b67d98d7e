"""Tests of listening sockets: the connections of a client port have the options that were set on the port."""

import socket
from contextlib import closing

import pytest

from fleet.net.sockets import UNSENT_BYTES, bind_tcp, configure_client_port


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("shared", [False, True])
def test_connections_have_the_options_of_the_port(host, shared):
    listening, _ = bind_tcp(f"{host}:0", setting="listen", shared=shared)
    with listening:
        configure_client_port(listening)
        with socket.create_connection(listening.getsockname()[:2]), closing(listening.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
