"""The tiny model that `fleet up` builds."""

import json
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import AnswerParsers, ChatMessage
from fleet.frontend.text.codec import load_codec
from fleet.local.tiny_model import CHECKSUMS, SPECIAL_TOKENS, VOCABULARY, build_tiny_model
from workers.engines.parser_names import parsers_for
from workers.settings import WorkerSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("cache"))


def test_the_same_model_comes_out_each_time(model, tmp_path):
    again = build_tiny_model(tmp_path)

    assert again.name == model.name
    for file in model.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_tokenizer_has_exactly_the_vocabulary_of_the_model(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    assert tokenizer.get_vocab_size(with_added_tokens=True) == VOCABULARY
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    text = "Größe → def f(x): return x**2  # ok\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_weights_have_the_shapes_that_the_configuration_says(model):
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")

    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    assert weights["model.layers.3.self_attn.k_proj.weight"].shape == (kv_width, config["hidden_size"])
    assert len(weights) == 9 * config["num_hidden_layers"] + 3
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}
    assert abs(float(weights["lm_head.weight"].std()) - config["initializer_range"]) < 1e-3


def test_a_conversation_renders_with_the_tokens_of_the_template(model):
    codec = load_codec(model)

    ids = np.frombuffer(codec.render([ChatMessage(role="user", content="Hello")]), dtype="<u4").tolist()

    assert ids[:2] == [SPECIAL_TOKENS.index("<s>"), SPECIAL_TOKENS.index("<|user|>")]
    assert ids[-2:] == [SPECIAL_TOKENS.index("<|end|>"), SPECIAL_TOKENS.index("<|assistant|>")]
    assert set(codec.eos_token_ids) == {SPECIAL_TOKENS.index("</s>"), SPECIAL_TOKENS.index("<|end|>")}


def test_prompt_ends_the_thinking_only_if_it_is_turned_off(model):
    """Check also that Fleet does not take the chat template for that of a reasoning model."""
    codec, question = load_codec(model), [ChatMessage(role="user", content="hi")]
    plain, on, off = [
        codec.decode(codec.render(question, template_args=arguments))
        for arguments in ("", '{"enable_thinking": true}', '{"enable_thinking": false}')
    ]

    assert on == plain
    assert off == f"{plain}<think>\n\n</think>\n\n"
    settings = WorkerSettings(worker_id=WorkerId("w"), model=ModelName("tiny"), model_dir=str(model))
    assert parsers_for(settings, in_engine=False) == AnswerParsers(tool_calls="hermes")


def test_the_tokenizer_alone_is_enough_until_the_model_is_there(tmp_path):
    alone = build_tiny_model(tmp_path, tokenizer_only=True)
    assert not (alone / "model.safetensors").exists()

    whole = build_tiny_model(tmp_path)
    assert (whole / "model.safetensors").exists()
    assert build_tiny_model(tmp_path, tokenizer_only=True) == whole


def test_two_processes_may_build_at_once(tmp_path):
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as processes:
        folders = list(processes.map(build_tiny_model, [tmp_path] * 3))

    assert len(set(folders)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]  # no unfinished folder is left


@pytest.mark.parametrize("tokenizer_only", [True, False])
def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path, tokenizer_only):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10 if tokenizer_only else 1 << 20, most))
    try:
        with pytest.raises(OSError, match="File too large"):
            build_tiny_model(tmp_path, tokenizer_only=tokenizer_only)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    assert list(tmp_path.iterdir()) == []


def damages():
    def truncate(folder):
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.truncate(1000)

    def flip(folder):
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.seek(1 << 20)
            (byte,) = weights.read(1)
            weights.seek(1 << 20)
            weights.write(bytes([byte ^ 1]))

    yield truncate
    yield flip
    yield lambda folder: (folder / "tokenizer.json").write_text("{")
    yield lambda folder: (folder / "config.json").unlink()
    yield lambda folder: (folder / CHECKSUMS).unlink()
    yield lambda folder: (folder / CHECKSUMS).write_text("{}")


@pytest.mark.parametrize(
    "damage", list(damages()), ids=["truncated", "flipped", "garbled", "missing", "unchecked", "of_nothing"]
)
def test_a_damaged_model_is_built_anew(model, tmp_path, damage):
    whole = {file.name: file.read_bytes() for file in model.iterdir()}
    folder = tmp_path / model.name
    folder.mkdir()
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    assert build_tiny_model(tmp_path) == folder
    damage(folder)

    assert build_tiny_model(tmp_path) == folder

    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "nothing damaged is left"


def test_two_processes_may_mend_a_damaged_model_at_once(tmp_path):
    folder = build_tiny_model(tmp_path)
    (folder / "config.json").write_text("{}")
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as processes:
        folders = list(processes.map(build_tiny_model, [tmp_path] * 3))

    assert set(folders) == {folder}
    assert build_tiny_model(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
