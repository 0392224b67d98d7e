"""Runs the API server for tests by itself: `python -m tests.support.kube.api [PORT]`.

It ends when its standard input is closed, or when you press Ctrl-C.
"""

import contextlib
import sys

from tests.support.kube.api.running import an_api_server

with (
    contextlib.suppress(KeyboardInterrupt),
    an_api_server(with_controllers=True, port=int((sys.argv[1:] or ["0"])[0])) as server,
):
    print(server.url, flush=True)
    sys.stdin.read()
