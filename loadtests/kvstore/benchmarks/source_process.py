"""Source process: it holds bytes that the benchmark fetches without a store, through a plain socket or NIXL.

    python -m loadtests.kvstore.benchmarks.source_process {socket,nixl} BYTES

It prints its address as one JSON line, and ends when its standard input ends.
"""

import json
import os
import select
import socket
import sys

import numpy as np

from loadtests.kvstore.compared.answering import untouched

CHUNK_BYTES = 1 << 20  # bytes of one NIXL transfer


def serve_by_socket(memory: memoryview, tell: int) -> None:
    """Accept one connection, and send the whole memory for each byte that arrives there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _say(tell, {"port": server.getsockname()[1]})
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(memory)


def serve_by_nixl(memory: memoryview, tell: int) -> None:
    """Let the benchmark read the memory by NIXL, and process its messages until standard input ends."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - optional, and slow to load

    agent = nixl_agent("source", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    agent.register_memory([(address, len(memory), 0, "")], "DRAM")
    _say(tell, {"metadata": agent.get_agent_metadata().hex(), "address": address})
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        agent.get_new_notifs()


def _say(tell: int, words: dict[str, object]) -> None:
    os.write(tell, json.dumps(words).encode() + b"\n")


def main() -> None:
    tell = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output, which must contain only the address
    size = int(sys.argv[2])
    memory = untouched(size)
    np.frombuffer(memory, dtype=np.uint8)[:] = 7
    {"socket": serve_by_socket, "nixl": serve_by_nixl}[sys.argv[1]](memoryview(memory), tell)


if __name__ == "__main__":
    main()
