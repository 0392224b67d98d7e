"""Resume tokens: what a client shows to go on with an answer whose router died.

Rules:

1. A token is self-contained. Routers of one cluster sign it with a key that follows from their common secret, and keep
   nothing for it. So any of them can go on with an answer that another one has begun.
2. It names the request, the tenant, the prompt (by a digest) and the weights that began the answer. It is worth nothing
   for another tenant, for another prompt, or after its time. What the client has of the answer is not in the token: the
   client sends it again, and could as well write it into a prompt.
3. A resumed request is not charged again for the request and its prompt, which the first router has charged. That holds
   for the first use of a token on a router, and for `MAX_FREE_RESUMES` of one request. Further ones count as new requests,
   so that nobody computes prompts for free.
4. Without a common secret, tokens are signed with a key that everybody knows. Then they are given only where clients
   have no keys, and where the network is therefore closed.
"""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b, sha256

import msgspec
from msgspec import Struct

from fleet.core.errors import RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import TokenBytes

FIELD = "resume.token"
MAX_FREE_RESUMES = 8
MAX_REMEMBERED_USES = 65_536  # about 150 bytes each
MAX_TOKEN_CHARACTERS = 4096
_MAC_BYTES = 16
_PURPOSE = b"fleet resume token 1"


class ResumeClaims(Struct, frozen=True, array_like=True):
    """Content of a resume token."""

    request_id: RequestId  # of the first request
    tenant: str
    issued: int  # Unix time in seconds, of the first request
    resumes: int  # how often the answer was resumed before
    prompt: bytes  # digest of model and prompt
    answer: int  # 64 random bits, which the answer has at all routers
    fingerprint: str = ""  # of the worker that began the answer; empty: not known yet

    @property
    def next_id(self) -> RequestId:
        """The id under which a router goes on with the request; it differs from the one of the stream that broke."""
        return RequestId(f"{self.request_id[:120]}.r{self.resumes + 1}")


def prompt_digest(model: ModelName, tokens: TokenBytes) -> bytes:
    """Return the digest of a model's name and a prompt."""
    return blake2b(tokens, digest_size=16, key=sha256(model.encode()).digest()).digest()


class ResumeTokens:
    """Issues and reads the tokens of one router process."""

    def __init__(self, secret: bytes, lifetime_seconds: int, unix_seconds: Callable[[], float]) -> None:
        """Derive the key.

        Args:
            secret: The secret that the routers of the cluster share; empty: there is none (rule 4).
            lifetime_seconds: Time after the first request for which tokens are accepted.
            unix_seconds: The wall clock, which routers share.
        """
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._lifetime_seconds = lifetime_seconds
        self._unix_seconds = unix_seconds
        self._used: OrderedDict[str, None] = OrderedDict()

    def now(self) -> int:
        """Return the time for new claims, in Unix seconds."""
        return int(self._unix_seconds())

    def issue(self, claims: ResumeClaims) -> str:
        """Return the signed token."""
        content = msgspec.msgpack.encode(claims)
        return urlsafe_b64encode(content + self._mac(content)).decode().rstrip("=")

    def read(self, token: str, tenant: str) -> ResumeClaims:
        """Return the content of a token.

        Raises:
            RequestRejected: INVALID_ARGUMENT; no router of this cluster has issued it to this tenant, or it has expired.
        """
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise _unknown()
        try:
            signed = urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (Base64Error, ValueError):
            raise _unknown() from None
        content, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(content)):
            raise _unknown()
        try:
            claims = msgspec.msgpack.decode(content, type=ResumeClaims)
        except msgspec.DecodeError:
            raise _unknown() from None
        if claims.tenant != tenant:
            raise _unknown()
        if self.now() - claims.issued > self._lifetime_seconds:
            raise invalid(
                FIELD,
                f"has expired, {self._lifetime_seconds} s after the request began; send the request again without it",
            )
        return claims

    def is_free(self, token: str, claims: ResumeClaims) -> bool:
        """Return whether a request with this valid token is free of charge (rule 3)."""
        return claims.resumes < MAX_FREE_RESUMES and token not in self._used

    def use(self, token: str) -> None:
        """Note that a request with this valid token was admitted."""
        self._used[token] = None
        if len(self._used) > MAX_REMEMBERED_USES:
            self._used.popitem(last=False)

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")[:_MAC_BYTES]


def _unknown() -> RequestRejected:
    return invalid(
        FIELD,
        "is not a token that a router of this cluster has given to this tenant; routers accept each other's tokens if they"
        " have the same prompt_secret or tenant_secret",
    )
