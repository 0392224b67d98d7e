"""Mutual proof of a secret at the start of a frame stream, without I/O.

Rules:

1. The caller sends a nonce and the listener answers with its own. Then the caller proves the secret over the kind of
   the stream and both nonces, and the listener proves it over the same bytes (`kvstore.security.authentication`,
   rules 1 and 2).
2. Before both peers have proven the secret, no other message is sent or read. A listener that cannot prove the secret
   gets no message.
3. A peer that does not take part gets an error message: it may run an older version or lack the secret.
"""

from fleet.net.streams.identity import StreamIdentity
from kvstore.security.authentication import NONCE_BYTES, PROOF_BYTES, AuthenticationKey, ProofSide, nonce

MAGIC = b"FLTPROOF"
"""First bytes of a handshake. They are no valid protobuf message, so a handshake cannot be mistaken for a message."""

TO_WORKERS, BETWEEN_ROUTERS = b"fleet.v1 router to worker", b"fleet.v1 router to router"
"""Kinds of streams. A proof for one kind is not valid for another."""

VERIFIED, REFUSED = b"\x01", b"\x00"

MAX_HANDSHAKE_BYTES = 4096
"""Maximum number of bytes of a payload before the proof; the first message of a stream has some hundred bytes."""


class ProofFailed(ConnectionError):
    """The peer did not prove the secret.

    Attributes:
        answer: Payload that reports the failure to the peer. Empty: the peer takes part in no handshake, or is the
            listener, which gets no report.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class ProofVerifier:
    """Performs the listener's side of one handshake."""

    def __init__(self, identity: StreamIdentity, kind: bytes) -> None:
        """Prepare for the handshake of one caller. The identity must have a key."""
        assert identity.key is not None
        self._key: AuthenticationKey = identity.key
        self._field = identity.field
        self._kind = kind
        self._mine = nonce()
        self._theirs = b""
        self.proven = False

    def received(self, payload: bytes) -> bytes:
        """Handle the caller's next payload and return the answer; after the caller's proof, `proven` is True.

        Raises:
            ProofFailed: The caller does not know the secret.
        """
        if not self._theirs:
            if not is_opening(payload):
                raise ProofFailed(
                    f"it proves no secret, and {self._field}.secret_file is set here: set the same at its end"
                )
            self._theirs = payload[len(MAGIC) :]
            return MAGIC + self._mine
        words = (self._kind, self._theirs, self._mine)
        if len(payload) != PROOF_BYTES or not self._key.proves(payload, ProofSide.CLIENT, *words):
            raise ProofFailed(f"it proves another secret than the one in {self._field}.secret_file", MAGIC + REFUSED)
        self.proven = True
        return MAGIC + VERIFIED + self._key.proof(ProofSide.NODE, *words)


class Prover:
    """Performs the caller's side of one handshake."""

    def __init__(self, identity: StreamIdentity, kind: bytes) -> None:
        """Start a handshake, in which the caller sends `opening` first. The arguments are those of `ProofVerifier`."""
        assert identity.key is not None
        self._key: AuthenticationKey = identity.key
        self._field = identity.field
        self._kind = kind
        self._mine = nonce()
        self._words: tuple[bytes, ...] = ()
        self.proven = False

    @property
    def opening(self) -> bytes:
        return MAGIC + self._mine

    def received(self, payload: bytes) -> bytes:
        """Handle the listener's next payload; return the next payload to send; empty at the end of the handshake.

        Raises:
            ProofFailed: The listener does not know the secret, or does not accept this end's proof.
        """
        if not self._words:
            if not is_opening(payload):
                raise ProofFailed(
                    f"it proves no secret, and {self._field}.secret_file is set here: set the same at its end"
                )
            self._words = (self._kind, self._mine, payload[len(MAGIC) :])
            return self._key.proof(ProofSide.CLIENT, *self._words)
        if payload == MAGIC + REFUSED:
            raise ProofFailed(f"it has another secret than the one in {self._field}.secret_file")
        given = payload.removeprefix(MAGIC + VERIFIED)
        if len(given) != PROOF_BYTES or not self._key.proves(given, ProofSide.NODE, *self._words):
            raise ProofFailed(f"it does not prove the secret in {self._field}.secret_file")
        self.proven = True
        return b""


def is_opening(payload: bytes) -> bool:
    """Return whether a payload has the form of the first one that either side sends in a handshake: `MAGIC` and a nonce."""
    return payload.startswith(MAGIC) and len(payload) == len(MAGIC) + NONCE_BYTES
