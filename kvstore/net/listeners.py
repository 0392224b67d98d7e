"""The end of a listening port."""

import asyncio


def stop_listening(server: asyncio.Server) -> None:
    """Accept nothing more, and close the server in the next turn of its loop.

    asyncio gives an accepted connection its transport one turn after `accept`. If the server is closed in between, an assertion
    in `Server._attach` fails, nobody closes the accepted socket, and its client waits for an answer until the garbage collector
    comes by (CPython 3.11 to 3.13).
    """
    loop = server.get_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    loop.call_soon(server.close)
