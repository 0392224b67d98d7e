"""Proofs that a caller or a connection knows a secret."""

import pytest
from msgspec.structs import replace

from kvstore.security.authentication import (
    SKEW_SECONDS,
    AuthenticationKey,
    CallProof,
    OutdatedProof,
    ProofSide,
    Purpose,
    nonce,
)

KEY = AuthenticationKey(b"a secret of some length", Purpose.CONTROL)
METHOD = "/kvstore.v1.BlockStore/Match"
BODY = b"the bytes of a request"
NOW = 1_700_000_000


def test_proof_is_bound_to_secret_purpose_side_and_words():
    proof = KEY.proof(ProofSide.CLIENT, b"some", b"words")

    assert KEY.proves(proof, ProofSide.CLIENT, b"some", b"words")
    assert not KEY.proves(proof, ProofSide.NODE, b"some", b"words")
    assert not KEY.proves(proof, ProofSide.CLIENT, b"somew", b"ords")
    assert not KEY.proves(proof[:-1], ProofSide.CLIENT, b"some", b"words")
    assert not AuthenticationKey(b"a secret of some length", Purpose.DATA).proves(
        proof, ProofSide.CLIENT, b"some", b"words"
    )
    assert not AuthenticationKey(b"another secret, as long", Purpose.CONTROL).proves(
        proof, ProofSide.CLIENT, b"some", b"words"
    )


def test_nonces_do_not_repeat():
    assert len({nonce() for _ in range(1000)}) == 1000


def a_proof() -> CallProof:
    return CallProof.of(KEY, METHOD, BODY, unix_seconds=NOW, caller=nonce(), number=3)


def test_call_proof_survives_a_round_trip_as_text():
    proof = a_proof()

    assert CallProof.parse(proof.text) == proof
    assert proof.refusal(KEY, METHOD, BODY, NOW) == ""
    assert proof.is_answered_by(KEY, METHOD, BODY, proof.answer(KEY, METHOD, BODY))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2.2",
        "2.a.b.c.d",
        "2.1.00.1.00",
        f"2.1.{'0' * 32}.1.zz",
        f"2.1.{'0' * 32}.-1.00",
        f"2.1.{'0' * 32}.{1 << 64}.00",
        f"3.1.{'0' * 32}.1.00",
        f"2.1.{'0' * 32}.{'9' * 5000}.00",
    ],
)
def test_invalid_text_is_not_a_proof(text):
    with pytest.raises(ValueError, match=r"unpack|int|hex|no proof") as caught:
        CallProof.parse(text)
    assert not isinstance(caught.value, OutdatedProof)


def test_proof_without_request_is_reported_as_outdated():
    with pytest.raises(OutdatedProof):
        CallProof.parse(f"{NOW}.{'0' * 32}.{'0' * 64}")


def test_call_proof_is_refused_for_another_call_or_later():
    proof = a_proof()

    assert "secret" in proof.refusal(KEY, METHOD + "2", BODY, NOW)
    assert "another call" in proof.refusal(KEY, METHOD, BODY + b"2", NOW)
    assert "another call" in replace(proof, number=4).refusal(KEY, METHOD, BODY, NOW)
    assert proof.refusal(KEY, METHOD, BODY, NOW + SKEW_SECONDS) == ""
    assert "-301 s ahead" in proof.refusal(KEY, METHOD, BODY, NOW + 1 + SKEW_SECONDS)
    assert "301 s ahead" in proof.refusal(KEY, METHOD, BODY, NOW - 1 - SKEW_SECONDS)


def test_a_client_cannot_be_answered_with_its_own_proof():
    proof = a_proof()

    assert not proof.is_answered_by(KEY, METHOD, BODY, proof.proof)
    assert not proof.is_answered_by(KEY, METHOD + "2", BODY, proof.answer(KEY, METHOD, BODY))
    assert not proof.is_answered_by(KEY, METHOD, BODY + b"2", proof.answer(KEY, METHOD, BODY))
