"""Who may speak to a node over a network, and whether it is that node: both ends prove that they have a secret.

Rules:

1. Proofs are HMAC-SHA-256 under a key that is derived from the deployment's secret, a different one for each purpose,
   and are compared in constant time. What is signed begins with who signs: no proof can be handed back as the other end's.
2. On the data plane a connection's proofs are over nonces of both ends and its namespace, so that one that was overheard
   opens nothing. The client proves first; a node that cannot answer with its own proof gets no request.
3. On the control plane a call's proof is over its method, its time and a nonce, and the node's over the same; it holds for
   that method only, and is refused when the clocks differ by more than `SKEW_SECONDS`.
4. This keeps strangers out, and nothing else: bytes are neither hidden nor sealed, and whoever can change what is on the
   wire can take a connection over. Networks where that can happen want TLS, and IPsec or WireGuard under the data plane.
"""

import hashlib
import hmac
import secrets
from enum import StrEnum
from typing import Self

from msgspec import Struct

NONCE_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 16
"""The least that a secret may have: it can be guessed offline by whoever overhears a proof."""

SKEW_SECONDS = 300
"""Between the clocks of a client and a node. A proof of the control plane that was overheard is of use for no longer."""


class Purpose(StrEnum):
    DATA = "kvstore.v1 data plane"
    CONTROL = "kvstore.v1 control plane"
    STREAMS = "fleet.v1 streams of frames"


class Side(StrEnum):
    CLIENT = "client"
    NODE = "node"


class Key:
    """A secret, made ready for one purpose."""

    def __init__(self, secret: bytes, purpose: Purpose):
        assert len(secret) >= SECRET_BYTES, f"a secret has {SECRET_BYTES} bytes or more, not {len(secret)}"
        self._key = hmac.digest(secret, purpose.encode(), hashlib.sha256)

    def proof(self, side: Side, *words: bytes) -> bytes:
        """32 bytes that only who has the secret can make. Words are told apart by their lengths, which go in too."""
        said = b"".join(len(word).to_bytes(4, "big") + word for word in (side.encode(), *words))
        return hmac.digest(self._key, said, hashlib.sha256)

    def proves(self, proof: bytes, side: Side, *words: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side, *words))


def nonce() -> bytes:
    """16 bytes that never come twice."""
    return secrets.token_bytes(NONCE_BYTES)


class CallProof(Struct, frozen=True):
    """What a call of the control plane carries, in metadata."""

    unix_seconds: int  # by the clock of whoever calls
    nonce: bytes
    proof: bytes

    @classmethod
    def of(cls, key: Key, method: str, unix_seconds: int, drawn: bytes) -> Self:
        """For a call of `method`, as in ``/kvstore.v1.BlockStore/Match``."""
        return cls(unix_seconds, drawn, key.proof(Side.CLIENT, *_words(method, unix_seconds, drawn)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Out of its `text`.

        Raises:
            ValueError: It is none.
        """
        time, drawn, proof = text.split(".")
        return cls(int(time), bytes.fromhex(drawn), bytes.fromhex(proof))

    @property
    def text(self) -> str:
        return f"{self.unix_seconds}.{self.nonce.hex()}.{self.proof.hex()}"

    def refusal(self, key: Key, method: str, now_unix_seconds: int) -> str:
        """Why a node does not serve the call; empty: it does."""
        if not key.proves(self.proof, Side.CLIENT, *_words(method, self.unix_seconds, self.nonce)):
            return "the proof is not of this node's secret: set the client's secret to the node's"
        if abs(ahead := self.unix_seconds - now_unix_seconds) > SKEW_SECONDS:
            return f"the client's clock is {ahead} s ahead of the node's: set the clocks, {SKEW_SECONDS} s may be between them"
        return ""

    def answer(self, key: Key, method: str) -> bytes:
        """The node's own proof, over the same."""
        return key.proof(Side.NODE, *_words(method, self.unix_seconds, self.nonce))

    def is_answered_by(self, key: Key, method: str, proof: bytes) -> bool:
        return key.proves(proof, Side.NODE, *_words(method, self.unix_seconds, self.nonce))


def _words(method: str, unix_seconds: int, drawn: bytes) -> tuple[bytes, ...]:
    return method.encode(), str(unix_seconds).encode(), drawn
