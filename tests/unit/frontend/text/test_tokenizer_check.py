"""Tokenizer check when a worker joins."""

import logging

import pytest
from msgspec import structs

from fleet.core.work import TokenizerDigests
from fleet.frontend.text import tokenizer_check
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_check import TokenizerCheck, folder_tokenizer_digests, tokenizer_digests
from tests.support.builders import MODEL, a_description


@pytest.fixture
def codec(model_dir):
    return load_codec(model_dir)


def test_a_worker_with_the_same_tokenizer_is_accepted(codec, model_dir):
    check = TokenizerCheck({MODEL: codec})
    told = folder_tokenizer_digests(str(model_dir), 32)

    assert all((told.tokens, told.template, told.blocks))
    assert check.accepts(structs.replace(a_description(), tokenizer_digests=told))
    assert check.accepts(a_description()), "an older worker reports no digests"
    assert check.refused() == {(MODEL, "tokens"): 0, (MODEL, "blocks"): 0}


def test_missing_digest_is_not_compared(codec, tmp_path):
    told = folder_tokenizer_digests(str(tmp_path), 32)

    assert (told.tokens, told.template) == ("", "")
    assert TokenizerCheck({MODEL: codec}).accepts(structs.replace(a_description(), tokenizer_digests=told))
    assert TokenizerCheck({}).accepts(structs.replace(a_description(), tokenizer_digests=tokenizer_digests(codec, 32)))


@pytest.mark.parametrize("field", ["tokens", "blocks"])
def test_worker_with_other_tokens_or_block_names_is_refused(codec, field, caplog):
    check = TokenizerCheck({MODEL: codec})
    told = structs.replace(tokenizer_digests(codec, 32), **{field: "0" * 32})

    assert not check.accepts(structs.replace(a_description(), tokenizer_digests=told))
    assert check.refused()[MODEL, field] == 1
    (said,) = caplog.records
    assert (said.levelno, said.worker, said.different) == (logging.ERROR, "w1", field)

    assert check.accepts(structs.replace(a_description(), tokenizer_digests=tokenizer_digests(codec, 32)))
    assert check.refused()[MODEL, field] == 0, "a new incarnation is checked again"


def test_worker_with_another_template_is_only_logged(codec, caplog):
    told = structs.replace(tokenizer_digests(codec, 32), template="0" * 32)

    assert TokenizerCheck({MODEL: codec}).accepts(structs.replace(a_description(), tokenizer_digests=told))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_digest_depends_on_block_size_and_salt_rule(codec, monkeypatch):
    ours = tokenizer_digests(codec, 32)

    assert tokenizer_digests(codec, 16).blocks != ours.blocks
    assert tokenizer_digests(codec, 16).tokens == ours.tokens
    monkeypatch.setattr(tokenizer_check, "adapter_salt", lambda adapter, salt: b"x" * 32)
    assert tokenizer_digests(codec, 32).blocks != ours.blocks
    assert tokenizer_digests(None, 32) == TokenizerDigests(blocks=tokenizer_digests(codec, 32).blocks)


def test_block_names_are_stable_between_versions():
    """Compare a digest with a fixed one: if it changes, workers and routers of different versions are incompatible."""
    assert tokenizer_digests(None, 32).blocks == "10348c8880d2e1bce449501a4995accc"
