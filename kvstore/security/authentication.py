"""Authentication between a node and its peers: both peers prove that they have the same secret.

Rules:

1. Proofs are HMAC-SHA-256 under a key that is derived from the deployment's secret; each purpose has its own key. They
   are compared in constant time. The signed bytes begin with the name of the side that signs. A peer can therefore not
   use a received proof as its own proof.
2. On the data plane, the proofs of a connection cover nonces of both peers and the namespace, so a proof that an
   attacker has overheard is useless. The client sends its proof first. A node that cannot answer with its own proof
   gets no request.
3. On the control plane, the proof of a call covers its method, the digest of the request's bytes, the time, the caller,
   and a number that counts the caller's calls. The node's proof covers the same. A proof is therefore valid for one
   request, and is accepted once (`kvstore.security.call_replays`). It is refused if the clocks differ by more than
   `SKEW_SECONDS`, or if its time is earlier than the opening of the node's port.
4. These proofs only keep out callers without the secret. The bytes are neither encrypted nor protected against changes.
   An attacker who can change bytes on the wire can take over a connection. A network where that can happen needs TLS,
   and IPsec or WireGuard for the data plane.
"""

import hashlib
import hmac
import re
import secrets
from enum import StrEnum
from typing import Self

from msgspec import Struct

NONCE_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 16
"""Minimum length of a secret. A secret must not be shorter, because an attacker who overhears a proof can try all short
secrets offline."""

SKEW_SECONDS = 300
"""Maximum difference between the clocks of client and node. A node remembers an accepted proof until it is no longer
valid.
"""

CALL_PROOF_VERSION = "2"
"""First word of a call's proof. Older programs send proofs without this word; their proofs do not cover the request."""


class Purpose(StrEnum):
    DATA = "kvstore.v1 data plane"
    CONTROL = "kvstore.v1 control plane"
    ROUTER_CONTROL = "fleet.v1 control port"
    STREAMS = "fleet.v1 streams of frames"


class ProofSide(StrEnum):
    CLIENT = "client"
    NODE = "node"


class AuthenticationKey:
    """Makes and checks proofs for one purpose, with a key that is derived from the deployment's secret."""

    def __init__(self, secret: bytes, purpose: Purpose):
        assert len(secret) >= SECRET_BYTES, f"a secret has {SECRET_BYTES} bytes or more, not {len(secret)}"
        self._key = hmac.digest(secret, purpose.encode(), hashlib.sha256)

    def proof(self, side: ProofSide, *words: bytes) -> bytes:
        """Return a proof of 32 bytes, which only an owner of the secret can compute.

        It covers `side`, the `words` (the data that is proven), and their lengths.
        """
        said = b"".join(len(word).to_bytes(4, "big") + word for word in (side.encode(), *words))
        return hmac.digest(self._key, said, hashlib.sha256)

    def proves(self, proof: bytes, side: ProofSide, *words: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side, *words))


def nonce() -> bytes:
    """Return 16 new random bytes, which practically never repeat."""
    return secrets.token_bytes(NONCE_BYTES)


class CallProof(Struct, frozen=True, kw_only=True):
    """Proof of one call of the control plane; it travels in the call's metadata."""

    unix_seconds: int  # time by the caller's clock
    caller: bytes  # random id of the caller, drawn once for each channel
    number: int  # number of this call among the caller's calls
    proof: bytes

    @classmethod
    def of(
        cls, key: AuthenticationKey, method: str, request: bytes, *, unix_seconds: int, caller: bytes, number: int
    ) -> Self:
        """Return the proof of a call of a method such as ``/kvstore.v1.BlockStore/Match``.

        `number` must differ for each call of the same caller.
        """
        words = _words(method, request, unix_seconds, caller, number)
        return cls(unix_seconds=unix_seconds, caller=caller, number=number, proof=key.proof(ProofSide.CLIENT, *words))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a proof from its `text`; raise OutdatedProof for a proof of an earlier version, and ValueError if `text` is no proof."""
        if OUTDATED.fullmatch(text):
            raise OutdatedProof("a proof that does not cover its request")
        version, time, caller, number, proof = text.split(".")
        if version != CALL_PROOF_VERSION or not 0 <= int(number) < 1 << 64 or len(caller) != 2 * NONCE_BYTES:
            raise ValueError(f"this is no proof of version {CALL_PROOF_VERSION}")
        return cls(unix_seconds=int(time), caller=bytes.fromhex(caller), number=int(number), proof=bytes.fromhex(proof))

    @property
    def text(self) -> str:
        words = (CALL_PROOF_VERSION, self.unix_seconds, self.caller.hex(), self.number, self.proof.hex())
        return ".".join(map(str, words))

    def refusal(self, key: AuthenticationKey, method: str, request: bytes, now_unix_seconds: int) -> str:
        """Return a text that explains why the call has to be refused; empty if its proof is valid."""
        words = _words(method, request, self.unix_seconds, self.caller, self.number)
        if not key.proves(self.proof, ProofSide.CLIENT, *words):
            return "the proof is not of this port's secret, or was made for another call: set the caller's secret to that of this port"
        if abs(ahead := self.unix_seconds - now_unix_seconds) > SKEW_SECONDS:
            return f"the caller's clock is {ahead} s ahead of this port's: set the clocks, {SKEW_SECONDS} s may be between them"
        return ""

    def answer(self, key: AuthenticationKey, method: str, request: bytes) -> bytes:
        """Return the node's proof for this call, which covers the same data as the caller's proof."""
        return key.proof(ProofSide.NODE, *_words(method, request, self.unix_seconds, self.caller, self.number))

    def is_answered_by(self, key: AuthenticationKey, method: str, request: bytes, proof: bytes) -> bool:
        words = _words(method, request, self.unix_seconds, self.caller, self.number)
        return key.proves(proof, ProofSide.NODE, *words)


class OutdatedProof(ValueError):
    """The caller's proof has the format of an older version, whose proofs did not cover the request."""


# Format of a proof of an older version: time, nonce, proof.
OUTDATED = re.compile(rf"\d+\.[0-9a-f]{{{2 * NONCE_BYTES}}}\.[0-9a-f]{{{2 * PROOF_BYTES}}}")


def _words(method: str, request: bytes, unix_seconds: int, caller: bytes, number: int) -> tuple[bytes, ...]:
    digest = hashlib.sha256(request).digest()
    return method.encode(), digest, str(unix_seconds).encode(), caller, str(number).encode()
