"""Engine memory: writes to the KV memory of a running vLLM engine, to damage blocks that it hands over.

The side channel of vLLM's NIXL connector tells where the memory is, as it tells a decode engine. The operating system lets
a process write to the memory of its descendants.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

ANSWER_MS = 30_000
DESCRIBE = (b"get_meta_msg", 0, 0)
"""Request to vLLM's NIXL connector for the description of its first rank. It is written out here, because importing vLLM's
own names takes seconds."""


class LentMemory:
    """Gives access to the blocks that a prefill engine with one rank keeps for a handoff."""

    def __init__(self, params: dict[str, Any]):
        """Find the memory of the engine; `params` are the transfer parameters of the handoff."""
        (self.block_ids,) = params["remote_block_ids"]
        described = _described(params["remote_host"], params["remote_port"])
        self._layers: list[int] = described["kv_caches_base_addr"]
        self._strides: list[int] = described["block_strides"]
        self._process = _owner(params["remote_port"])
        self.layers = len(self._layers)
        self.layer_bytes: int = described["block_lens"][0]

    def flip(self, position: int, *, layer: int, first: int, step: int | None = None) -> None:
        """Flip a bit in one layer of the block at a position of the prompt.

        The bit is flipped in the byte `first`; with `step`, also in every further byte at this distance.
        """
        start = self._layers[layer] + self.block_ids[position] * self._strides[layer]
        with Path(f"/proc/{self._process}/mem").open("r+b", buffering=0) as memory:
            content = bytearray(os.pread(memory.fileno(), self.layer_bytes, start))
            for at in [first] if step is None else range(first, self.layer_bytes, step):
                content[at] ^= 0x40
            assert os.pwrite(memory.fileno(), content, start) == self.layer_bytes


def _described(host: str, port: int) -> dict[str, Any]:
    with zmq.Context() as context, context.socket(zmq.REQ) as channel:
        channel.setsockopt(zmq.LINGER, 0)
        channel.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        channel.connect(f"tcp://{host}:{port}")
        channel.send(msgspec.msgpack.encode(DESCRIBE))
        payload = msgspec.msgpack.decode(channel.recv_multipart()[0])
    described: dict[str, Any] = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    return described


def _owner(port: int) -> int:
    """Return the id of the descendant of this process that listens on a port."""
    for process in psutil.Process().children(recursive=True):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                return process.pid
    raise AssertionError(f"no descendant of this process listens on port {port}")
