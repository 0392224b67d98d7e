from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.frontend import resume_tokens
from fleet.frontend.resume_tokens import MAX_FREE_RESUMES, ResumeClaims, ResumeTokens, prompt_digest

CLAIMS = ResumeClaims(RequestId("mine"), "acme", 1000, 0, prompt_digest(ModelName("tiny"), b"tokens"), 7, "weights")


class Time:
    seconds = 1000

    def __call__(self) -> int:
        return self.seconds


def a_router(secret: bytes = b"secret", time: Time | None = None) -> ResumeTokens:
    return ResumeTokens(secret, 60, time or Time())


def refusal(tokens: ResumeTokens, token: str, tenant: str = "acme") -> RequestRejected:
    with pytest.raises(RequestRejected) as raised:
        tokens.read(token, tenant)
    assert raised.value.reason is Reason.INVALID_ARGUMENT
    assert raised.value.field == "resume.token"
    return raised.value


def test_router_with_same_secret_reads_token():
    assert a_router().read(a_router().issue(CLAIMS), "acme") == CLAIMS


def test_token_of_another_tenant_or_secret_is_refused_alike():
    token = a_router().issue(CLAIMS)
    foreign = refusal(a_router(), token, "other")
    assert refusal(a_router(b"another secret"), token).message == foreign.message


@given(st.binary(max_size=200), st.data())
def test_changed_token_is_refused(junk, data):
    token = a_router().issue(CLAIMS)
    place = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("ABCxyz019-_").filter(lambda character: character != token[place]))
    refusal(a_router(), token[:place] + other + token[place + 1 :])
    refusal(a_router(), junk.hex())
    refusal(a_router(), token[:place])


@pytest.mark.parametrize("token", ["", "=", "ä", "A" * 100_000, "\x00"])
def test_text_that_is_no_token_is_refused(token):
    refusal(a_router(), token)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_token_in_another_form_is_refused(length):
    """Write a token in other forms: if they were accepted, one token could be used for free once in each form."""
    token = a_router().issue(structs.replace(CLAIMS, fingerprint="w" * length))

    for other in (f"{token}=", f"{token}====", f"!!!!{token}", f"{token}\n\n\n\n"):
        refusal(a_router(), other)


def test_expired_token_is_refused_with_its_lifetime():
    time = Time()
    tokens = a_router(time=time)
    token = tokens.issue(CLAIMS)
    time.seconds += 60
    assert tokens.read(token, "acme") == CLAIMS
    time.seconds += 1
    assert "has expired, 60 s" in refusal(tokens, token).message


def test_second_use_of_a_stream_and_many_resumes_are_charged():
    """Use an early token of a stream, which names no fingerprint, and then a later one: the second use is charged."""
    tokens = a_router()
    first, other = structs.replace(CLAIMS, fingerprint=""), structs.replace(CLAIMS, stream=8)
    assert tokens.is_free(first)
    tokens.use(first)
    assert not tokens.is_free(first)
    assert not tokens.is_free(CLAIMS)
    assert tokens.is_free(other)
    assert not tokens.is_free(structs.replace(CLAIMS, resumes=MAX_FREE_RESUMES))


def test_answer_is_resumed_for_free_eight_times_at_a_router():
    """Resume many streams of one answer, each after few resumptions: a router makes only `MAX_FREE_RESUMES` of them free."""
    tokens = a_router()
    streams = [structs.replace(CLAIMS, resumes=stream % 3, stream=stream) for stream in range(2 * MAX_FREE_RESUMES)]
    free = 0
    for claims in streams:
        free += tokens.is_free(claims)
        tokens.use(claims)
    assert free == MAX_FREE_RESUMES
    for other in ({"tenant": "other"}, {"request_id": RequestId("other")}, {"issued": CLAIMS.issued + 1}):
        assert tokens.is_free(structs.replace(CLAIMS, **other)), "it is of another answer"


def test_remembered_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(resume_tokens, "MAX_REMEMBERED_ANSWERS", 2)
    tokens = a_router()
    answers = [structs.replace(CLAIMS, request_id=RequestId(name)) for name in "abc"]
    for claims in answers:
        tokens.use(claims)
    assert [claims.request_id for claims in answers if tokens.is_free(claims)] == ["a"]


@pytest.mark.parametrize("moved", [b"a", b"ac", b"acme"])
def test_start_of_a_tenant_cannot_pass_as_content(moved):
    """Move letters from the tenant's name to the end of the content: the signature covers both without a mark between them."""
    token = a_router().issue(structs.replace(CLAIMS, tenant="acme"))
    signed = urlsafe_b64decode(token + "=" * (-len(token) % 4))
    longer = urlsafe_b64encode(signed[:-16] + moved + signed[-16:]).decode().rstrip("=")
    with pytest.raises(RequestRejected):
        a_router().read(longer, "acme"[len(moved) :])


def test_digest_tells_models_and_prompts_apart():
    digests = {prompt_digest(ModelName(model), prompt) for model in ("a", "b") for prompt in (b"", b"x")}
    assert len(digests) == 4


def test_resumed_request_has_an_id_of_its_own():
    assert CLAIMS.next_id == "mine.r1"
    long = structs.replace(CLAIMS, request_id=RequestId("x" * 128), resumes=11)
    assert long.next_id == "x" * 120 + ".r12"


@given(st.text("0aF", min_size=31, max_size=33), st.text("0aF", min_size=31, max_size=33))
def test_names_that_look_hexadecimal_are_read_unchanged(request_id, fingerprint):
    claims = structs.replace(CLAIMS, request_id=RequestId(request_id), fingerprint=fingerprint)
    assert a_router().read(a_router().issue(claims), "acme") == claims


def test_token_with_usual_names_is_short_enough_for_each_event():
    usual = structs.replace(CLAIMS, request_id=RequestId("0a" * 16), fingerprint="1f" * 16, stream=2**64 - 1)
    assert len(a_router().issue(structs.replace(usual, issued=2**32 - 1))) <= 110
