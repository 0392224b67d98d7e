"""Who may speak to a node over a network, and whether it is that node: both ends prove that they have a secret.

Rules:

1. Proofs are HMAC-SHA-256 under a key that is derived from the deployment's secret, a different one for each purpose,
   and are compared in constant time. What is signed begins with who signs: no proof can be handed back as the other end's.
2. On the data plane a connection's proofs are over nonces of both ends and its namespace, so that one that was overheard
   opens nothing. The client proves first; a node that cannot answer with its own proof gets no request.
3. On the control plane a call's proof is over its method, the digest of the very bytes of its request, its time, and who
   calls with a number that counts that caller's calls. The node's proof is over the same. A proof therefore holds for that
   request only, is accepted once (`kvstore.security.call_replays`), and is refused when the clocks differ by more than `SKEW_SECONDS`.
4. This keeps strangers out, and nothing else: bytes are neither hidden nor sealed, and whoever can change what is on the
   wire can take a connection over. Networks where that can happen want TLS, and IPsec or WireGuard under the data plane.
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
"""The least that a secret may have: it can be guessed offline by whoever overhears a proof."""

SKEW_SECONDS = 300
"""The clocks of a client and a node may be this far apart. A node remembers accepted proofs for as long as this makes them valid."""

CALL_PROOF_VERSION = "2"
"""The first word of a call's proof. Proofs without it are of versions that did not cover the request's bytes."""


class Purpose(StrEnum):
    DATA = "kvstore.v1 data plane"
    CONTROL = "kvstore.v1 control plane"
    ROUTER_CONTROL = "fleet.v1 control port"
    STREAMS = "fleet.v1 streams of frames"


class ProofSide(StrEnum):
    CLIENT = "client"
    NODE = "node"


class AuthenticationKey:
    """A secret, made ready for one purpose."""

    def __init__(self, secret: bytes, purpose: Purpose):
        assert len(secret) >= SECRET_BYTES, f"a secret has {SECRET_BYTES} bytes or more, not {len(secret)}"
        self._key = hmac.digest(secret, purpose.encode(), hashlib.sha256)

    def proof(self, side: ProofSide, *words: bytes) -> bytes:
        """32 bytes that only who has the secret can make. Words are told apart by their lengths, which go in too."""
        said = b"".join(len(word).to_bytes(4, "big") + word for word in (side.encode(), *words))
        return hmac.digest(self._key, said, hashlib.sha256)

    def proves(self, proof: bytes, side: ProofSide, *words: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side, *words))


def nonce() -> bytes:
    """16 bytes that never come twice."""
    return secrets.token_bytes(NONCE_BYTES)


class CallProof(Struct, frozen=True, kw_only=True):
    """Proof of one call of the control plane; it travels in the call's metadata."""

    unix_seconds: int  # by the caller's clock
    caller: bytes  # drawn at random, once for each channel
    number: int  # counts the calls of that caller
    proof: bytes

    @classmethod
    def of(
        cls, key: AuthenticationKey, method: str, request: bytes, *, unix_seconds: int, caller: bytes, number: int
    ) -> Self:
        """Prove a call.

        Args:
            key: What both ends have.
            method: As in ``/kvstore.v1.BlockStore/Match``.
            request: The bytes of the request as they are sent.
            unix_seconds: The caller's time.
            caller: 16 bytes that name the caller.
            number: Another one for each call of that caller, at most 2**64 - 1.
        """
        words = _words(method, request, unix_seconds, caller, number)
        return cls(unix_seconds=unix_seconds, caller=caller, number=number, proof=key.proof(ProofSide.CLIENT, *words))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `text`.

        Raises:
            OutdatedProof: It is of an earlier version of this software.
            ValueError: It is no proof.
        """
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
        """Return why the call is not served, or an empty string."""
        words = _words(method, request, self.unix_seconds, self.caller, self.number)
        if not key.proves(self.proof, ProofSide.CLIENT, *words):
            return "the proof is not of this port's secret, or was made for another call: set the caller's secret to that of this port"
        if abs(ahead := self.unix_seconds - now_unix_seconds) > SKEW_SECONDS:
            return f"the caller's clock is {ahead} s ahead of this port's: set the clocks, {SKEW_SECONDS} s may be between them"
        return ""

    def answer(self, key: AuthenticationKey, method: str, request: bytes) -> bytes:
        """Return the node's own proof, over the same words."""
        return key.proof(ProofSide.NODE, *_words(method, request, self.unix_seconds, self.caller, self.number))

    def is_answered_by(self, key: AuthenticationKey, method: str, request: bytes, proof: bytes) -> bool:
        words = _words(method, request, self.unix_seconds, self.caller, self.number)
        return key.proves(proof, ProofSide.NODE, *words)


class OutdatedProof(ValueError):
    """The proof of a caller whose software is older than proofs over requests."""


OUTDATED = re.compile(rf"\d+\.[0-9a-f]{{{2 * NONCE_BYTES}}}\.[0-9a-f]{{{2 * PROOF_BYTES}}}")  # time, nonce, proof


def _words(method: str, request: bytes, unix_seconds: int, caller: bytes, number: int) -> tuple[bytes, ...]:
    digest = hashlib.sha256(request).digest()
    return method.encode(), digest, str(unix_seconds).encode(), caller, str(number).encode()
