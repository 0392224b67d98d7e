"""Resume tokens: signed texts with which a client goes on with an answer after its router died.

Rules:

1. A resume token is self-contained. The routers of a cluster sign it with a key derived from their common secret, and store
   nothing about it. So any router can go on with an answer that another router began.
2. The token names the request, the prompt (by a digest) and the fingerprint of the worker that began the answer, and its
   signature covers the tenant. It is not accepted for another tenant, for another prompt, or after its lifetime. It does
   not contain the tokens of the answer. Workers keep these tokens, or the client sends them. It is safe that clients send
   them, because a client could also write them into a prompt.
3. A resumption is free, because the first router has charged the tenant for the request and its prompt. But an answer that
   was already resumed `MAX_FREE_RESUMES` times in a row is not resumed for free any more. Each router resumes an answer at
   most `MAX_FREE_RESUMES` times for free, and at most once with tokens of the same stream. (The rest of an answer after a
   failed attempt counts as another stream.) All other resumptions are charged like new requests whose prompts end with
   the known tokens of the answer. If they were free, clients could have any prompts computed for free. The known tokens
   of a free resumption are not charged, although a client may have invented them.
4. Without a common secret, tokens are signed with a key that is no secret. Tokens are then issued only if clients need
   no API keys, because routers without API keys run only in closed networks.
"""

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.errors import RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import TokenBytes

FIELD = "resume.token"
NO_RESUME_TOKENS = (
    "is not possible here: this router gives no resume tokens, because its clients have keys and it has no secret; set"
    " prompt_secret or tenant_secret on all routers"
)
MAX_FREE_RESUMES = 8
# Maximum number of remembered answers that were resumed for free; each takes 300 to 900 bytes. Beyond it, the answer whose last free
# resumption is the longest ago is forgotten.
MAX_REMEMBERED_ANSWERS = 32_768
MAX_TOKEN_CHARACTERS = 4096
_MAC_BYTES = 16
_HEXADECIMAL = re.compile(r"[0-9a-f]*")
_encode = msgspec.msgpack.Encoder().encode
_PURPOSE = b"fleet resume token 2"
_Answer = tuple[str, RequestId, int]


class ResumeClaims(Struct, frozen=True):
    """Facts that a valid resume token states. The tenant is signed, but not contained in the token."""

    request_id: RequestId  # id of the original request, which began the answer
    tenant: str
    issued: int  # when the original request arrived, Unix time in seconds
    resumes: int  # how often the answer was resumed before this token was issued
    prompt: bytes  # digest of the request (`prompt_digest`, `shaped_digest`)
    # A random number of 64 bits that identifies the stream at all routers, and under which workers keep its tokens. A resumed
    # answer is a stream of its own, and so is the rest of an answer after a failed attempt (`LiveRequest.answer_key`).
    stream: int
    fingerprint: str = ""  # fingerprint of the worker that began the answer; empty if not known yet

    @property
    def answer(self) -> _Answer:
        """The identity of the answer, which all its streams share.

        Two answers have the same identity only if their client gives two requests the same id within a second.
        """
        return self.tenant, self.request_id, self.issued

    @property
    def next_id(self) -> RequestId:
        """The id of the request that resumes the answer.

        It differs from the id of the broken stream, because the request of that stream may still run.
        """
        return RequestId(f"{self.request_id[:120]}.r{self.resumes + 1}")


class _SignedContent(Struct, frozen=True, array_like=True):
    """The claims as a token contains them: in few bytes, because each server-sent event repeats the token, and without the tenant."""

    # The types are checked after decoding, because msgspec does not decode to `str | bytes`.
    request_id: Any  # a text, or bytes whose hexadecimal form is the id
    issued: int
    resumes: int
    prompt: bytes
    stream: int
    fingerprint: Any  # a text, or bytes whose hexadecimal form is the fingerprint


def prompt_digest(model: ModelName, tokens: TokenBytes) -> bytes:
    """Return the 12-byte digest of a model's name and a prompt."""
    keyed = _keyed_digest(model).copy()
    keyed.update(tokens)
    return keyed.digest()


def shaped_digest(prompt: bytes, shape: object) -> bytes:
    """Extend a digest of `prompt_digest` by further fields of the request; return 12 bytes.

    Args:
        prompt: The digest of model and prompt.
        shape: The fields, as an object that can be written as JSON.
    """
    return blake2b(prompt + msgspec.json.encode(shape), digest_size=12).digest()


@lru_cache(maxsize=256)  # one entry for each served model
def _keyed_digest(model: ModelName) -> blake2b:
    return blake2b(digest_size=12, key=sha256(model.encode()).digest())


class ResumeTokens:
    """Issues resume tokens for one router process, and reads those that any router of the cluster has issued."""

    def __init__(self, secret: bytes, lifetime_seconds: int, unix_seconds: Callable[[], float]) -> None:
        """Derive the signing key from the secret.

        Args:
            secret: Common secret of the routers of the cluster; empty if there is none (rule 4).
            lifetime_seconds: Time for which resume tokens are accepted, from the arrival of the original request on.
            unix_seconds: The wall clock, because one router may compute the age of a token that another router issued.
        """
        # BLAKE2 with a key is a MAC (RFC 7693). A copy of this object computes one in a sixth of the time of an HMAC.
        self._keyed = blake2b(digest_size=_MAC_BYTES, key=hmac.digest(secret, _PURPOSE, "sha256"))
        self._lifetime_seconds = lifetime_seconds
        self._unix_seconds = unix_seconds
        # The streams of each answer that were resumed for free. The answers are in the order of their latest free resumption.
        self._used: OrderedDict[_Answer, tuple[int, ...]] = OrderedDict()

    def now(self) -> int:
        """Return the current time for `ResumeClaims.issued`, in Unix seconds."""
        return int(self._unix_seconds())

    def issue(self, claims: ResumeClaims, fingerprint: str = "") -> str:
        """Return a signed token with these claims. If `fingerprint` is not empty, it replaces the fingerprint of the claims."""
        content = _encode(
            _SignedContent(
                _packed(claims.request_id),
                claims.issued,
                claims.resumes,
                claims.prompt,
                claims.stream,
                _packed(fingerprint or claims.fingerprint),
            )
        )
        return _encoded(content + self._mac(content, claims.tenant))

    def read(self, token: str, tenant: str) -> ResumeClaims:
        """Check the signature, tenant and age of a token, and return its content.

        Raises:
            RequestRejected: INVALID_ARGUMENT; no router of this cluster issued the token to this tenant, or it has expired.
        """
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise _unknown()
        try:
            signed = urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (Base64Error, ValueError):
            raise _unknown() from None
        content, mac = signed[:-_MAC_BYTES], signed[-_MAC_BYTES:]
        # Only the exact text that `issue` returns is accepted, because base64 can express the same bytes by several
        # texts.
        if not hmac.compare_digest(mac, self._mac(content, tenant)) or _encoded(signed) != token:
            raise _unknown()
        try:
            found = msgspec.msgpack.decode(content, type=_SignedContent)
        except msgspec.DecodeError:
            raise _unknown() from None
        # Without a secret anybody can sign a token, so a signed one may have any content.
        if not 0 <= found.stream < 1 << 64 or not all(
            isinstance(name, str | bytes) for name in (found.request_id, found.fingerprint)
        ):
            raise _unknown()
        if self.now() - found.issued > self._lifetime_seconds:
            raise invalid(
                FIELD,
                f"has expired, {self._lifetime_seconds} s after the request began; send the request again without it",
            )
        return ResumeClaims(
            request_id=RequestId(_unpacked(found.request_id)),
            tenant=tenant,
            issued=found.issued,
            resumes=found.resumes,
            prompt=found.prompt,
            stream=found.stream,
            fingerprint=_unpacked(found.fingerprint),
        )

    def is_free(self, claims: ResumeClaims) -> bool:
        """Return whether a request with a valid token of this content is free of charge (rule 3)."""
        used = self._used.get(claims.answer, ())
        return max(claims.resumes, len(used)) < MAX_FREE_RESUMES and claims.stream not in used

    def use(self, claims: ResumeClaims) -> None:
        """Remember that a request with a token of this content was admitted for free (rule 3). Do nothing if it was charged."""
        if not self.is_free(claims):
            return
        self._used[claims.answer] = (*self._used.get(claims.answer, ()), claims.stream)
        self._used.move_to_end(claims.answer)
        if len(self._used) > MAX_REMEMBERED_ANSWERS:
            self._used.popitem(last=False)

    def _mac(self, content: bytes, tenant: str) -> bytes:
        mac = self._keyed.copy()
        # No separator is needed between content and tenant, because `read` refuses a content that is cut or followed by further bytes.
        mac.update(content + tenant.encode())
        return mac.digest()


def _packed(name: str) -> str | bytes:
    """Return a name in few bytes. Random ids and fingerprints have 32 lower-case hexadecimal digits; such a name takes 16 bytes."""
    return bytes.fromhex(name) if len(name) == 32 and _HEXADECIMAL.fullmatch(name) else name


def _unpacked(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.hex()


def _encoded(signed: bytes) -> str:
    return urlsafe_b64encode(signed).decode().rstrip("=")


def _unknown() -> RequestRejected:
    return invalid(
        FIELD,
        "is not a token that a router of this cluster has given to this tenant; routers accept each other's tokens if they"
        " have the same prompt_secret or tenant_secret",
    )
