"""Listeners: stop a listening asyncio server without losing connections that were just accepted."""

import asyncio


def stop_listening(server: asyncio.Server) -> None:
    """Stop accepting connections now, and close the server in the next iteration of its event loop.

    asyncio makes the transport of an accepted connection in the iteration of the event loop after `accept`. If the
    server is closed before this iteration, an assertion in `Server._attach` fails, and nothing closes the accepted
    socket. The client then waits until the garbage collector closes the socket (CPython 3.11 to 3.13).
    """
    loop = server.get_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    loop.call_soon(server.close)
