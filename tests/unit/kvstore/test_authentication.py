"""Proofs of a secret."""

import pytest

from kvstore.transports.authentication import SKEW_SECONDS, CallProof, Key, Purpose, Side, nonce

KEY = Key(b"a secret of some length", Purpose.CONTROL)
METHOD = "/kvstore.v1.BlockStore/Match"


def test_a_proof_is_for_its_secret_purpose_side_and_words_only():
    proof = KEY.proof(Side.CLIENT, b"some", b"words")

    assert KEY.proves(proof, Side.CLIENT, b"some", b"words")
    assert not KEY.proves(proof, Side.NODE, b"some", b"words")
    assert not KEY.proves(proof, Side.CLIENT, b"somew", b"ords")
    assert not KEY.proves(proof[:-1], Side.CLIENT, b"some", b"words")
    assert not Key(b"a secret of some length", Purpose.DATA).proves(proof, Side.CLIENT, b"some", b"words")
    assert not Key(b"another secret, as long", Purpose.CONTROL).proves(proof, Side.CLIENT, b"some", b"words")


def test_nonces_never_come_twice():
    assert len({nonce() for _ in range(1000)}) == 1000


def test_a_calls_proof_survives_its_text():
    proof = CallProof.of(KEY, METHOD, 1_700_000_000, nonce())

    assert CallProof.parse(proof.text) == proof
    assert proof.refusal(KEY, METHOD, 1_700_000_000) == ""
    assert proof.is_answered_by(KEY, METHOD, proof.answer(KEY, METHOD))


@pytest.mark.parametrize("text", ["", "1.2", "a.b.c", "1.00.zz", "1.00.11.22"])
def test_other_text_is_no_proof(text):
    with pytest.raises(ValueError, match=r"unpack|int|hex"):
        CallProof.parse(text)


def test_a_calls_proof_is_of_no_use_for_another_method_or_later():
    proof = CallProof.of(KEY, METHOD, 1_700_000_000, nonce())

    assert "secret" in proof.refusal(KEY, METHOD + "2", 1_700_000_000)
    assert proof.refusal(KEY, METHOD, 1_700_000_000 + SKEW_SECONDS) == ""
    assert "-301 s ahead" in proof.refusal(KEY, METHOD, 1_700_000_001 + SKEW_SECONDS)
    assert "301 s ahead" in proof.refusal(KEY, METHOD, 1_699_999_999 - SKEW_SECONDS)


def test_a_client_cannot_be_answered_with_its_own_proof():
    proof = CallProof.of(KEY, METHOD, 1_700_000_000, nonce())

    assert not proof.is_answered_by(KEY, METHOD, proof.proof)
    assert not proof.is_answered_by(KEY, METHOD + "2", proof.answer(KEY, METHOD))
