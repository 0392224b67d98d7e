"""Mutual proof of a secret at the beginning of a stream of frames, without I/O.

Rules:

1. The caller sends a nonce, the listener answers with one of its own. Then the caller proves the secret over the kind of the stream and
   both nonces, and the listener proves it over the same words after that (`kvstore.security.authentication`, rules 1 and 2).
2. Nothing else is said or looked at before both have proven it. A listener that cannot prove it gets no message.
3. Who does not take part is told so: the other end may be of an older version, or lack the secret.
"""

from fleet.net.streams.identity import StreamIdentity
from kvstore.security.authentication import NONCE_BYTES, PROOF_BYTES, AuthenticationKey, ProofSide, nonce

MAGIC = b"FLTPROOF"
"""Begins a handshake. As a message of protobuf it would be malformed, so that nobody mistakes it for one."""

TO_WORKERS, BETWEEN_ROUTERS = b"fleet.v1 router to worker", b"fleet.v1 router to router"
"""Kinds of streams. A proof for one kind is none for another."""

VERIFIED, REFUSED = b"\x01", b"\x00"

MAX_HANDSHAKE_BYTES = 4096
"""The longest payload that is taken from who has proven nothing: a plain hello has some hundred bytes."""


class ProofFailed(ConnectionError):
    """The other end did not prove the secret.

    Attributes:
        answer: Tells the other end so in the words of the handshake; empty where it does not take part in one.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class ProofVerifier:
    """The listener's end of one handshake."""

    def __init__(self, identity: StreamIdentity, kind: bytes) -> None:
        """Begin to wait for a caller.

        Args:
            identity: Has a key.
            kind: Of the stream.
        """
        assert identity.key is not None
        self._key: AuthenticationKey = identity.key
        self._field = identity.field
        self._kind = kind
        self._mine = nonce()
        self._theirs = b""
        self.proven = False

    def received(self, payload: bytes) -> bytes:
        """Take the caller's next payload; returns the answer to it. `proven` says whether that was the last one.

        Raises:
            NotProven: The caller does not know the secret.
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
    """The caller's end of one handshake."""

    def __init__(self, identity: StreamIdentity, kind: bytes) -> None:
        """Begin a handshake; `opening` is to be sent first. Arguments are those of `ProofVerifier`."""
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
        """Take the listener's next payload; returns what to send next, if anything.

        Raises:
            NotProven: The listener does not know the secret, or does not accept this end's.
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
            raise ProofFailed(f"it does not prove the secret in {self._field}.secret_file: it is somebody else")
        self.proven = True
        return b""


def is_opening(payload: bytes) -> bool:
    """True if an end of a stream means to prove a secret."""
    return payload.startswith(MAGIC) and len(payload) == len(MAGIC) + NONCE_BYTES
