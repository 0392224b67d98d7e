"""Tiny model: builds a small model with Llama's architecture, which `fleet up` serves if no other model is given.

Rules:

1. Nothing is downloaded, and neither torch nor transformers is needed: the tokenizer is trained on Python's own
   documentation, and the weights come from a seeded generator.
2. The weights are random with a large standard deviation (0.08), so that greedy answers use the whole vocabulary. If
   answers repeated one token, equal tokens would not prove equal KV.
3. A model folder is built under a temporary name and renamed when it is complete, so that two processes may build it at
   the same time. Its name contains `FORMAT_VERSION` and a digest of the configuration, the seed and the training text. So
   if one of them changes, another folder is built.
4. `CHECKSUMS` in a folder holds the digests of its files. A folder that was damaged (a full disk, a crash, a bad
   sector), or that an earlier version built without checksums, is built again.
"""

import hashlib
import importlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # part of the folder's name; increase it when the code below builds something else

CHECKSUMS = "checksums.json"
"""Name of the file in a built folder that states the SHA-256 of each other file."""

SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
BOS, EOS, END = 0, 1, 5  # token ids: the trainer gives the special tokens the first ids, in their order

VOCABULARY = 4096
HIDDEN = 256
INTERMEDIATE = 688
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
MAX_MODEL_LEN = 4096  # maximum number of tokens of prompt and answer together

WEIGHTS_SEED = 20_26
WEIGHTS_STD = 0.08

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>You may call these functions:\n' }}"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\n' }}{% endfor %}"
    """{{ 'Write each call as\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|end|>' }}"""
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + message['content'] + '\n</tool_response><|end|>' }}"
    "{% elif message['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    """{{ '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' }}"""
    "{{ call['function']['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('role must be system, user, assistant or tool') }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|assistant|>' }}"
    # If a request turns thinking off, the prompt ends with an empty thinking part, as with Qwen3. The tags are escaped,
    # because a template that contains them literally is taken for the template of a reasoning model.
    r"{% if enable_thinking is defined and not enable_thinking %}{{ '\x3cthink>\n\n\x3c/think>\n\n' }}{% endif %}"
    "{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": WEIGHTS_STD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
    "use_cache": True,
}

GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": [EOS, END]}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_MODEL_LEN,
    "bos_token": SPECIAL_TOKENS[BOS],
    "eos_token": SPECIAL_TOKENS[EOS],
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def build_tiny_model(cache_dir: Path, *, tokenizer_only: bool = False) -> Path:
    """Return the folder of the tiny model in Hugging Face's layout.

    The first call builds it, which takes two seconds and 21 MB of disk space.

    Args:
        cache_dir: Folder in which built models are kept; it is made if it does not exist.
        tokenizer_only: If true, the folder need not have the weights. This suffices for the router and the simulated
            engine.

    Raises:
        OSError: `cache_dir` cannot be written.
    """
    text = _training_text()
    digest = _digest_of_recipe(text)
    complete = cache_dir / f"tiny-llama-v{FORMAT_VERSION}-{digest}"
    folder = complete.with_name(f"{complete.name}-tokenizer") if tokenizer_only else complete
    if (found := _whole(complete, folder)) is not None:
        return found
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
    try:
        building.chmod(0o755)
        _write_tokenizer(building, text)
        _write_json(building / "config.json", CONFIG)
        _write_json(building / "generation_config.json", GENERATION_CONFIG)
        if not tokenizer_only:
            weights = save(dict(_weights()), metadata={"format": "pt"})
            (building / "model.safetensors").write_bytes(weights)
        _write_json(building / CHECKSUMS, {file.name: _checksum(file) for file in sorted(building.iterdir())})
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _whole(*folders: Path) -> Path | None:
    """Return the first of these folders that exists and is undamaged, or None."""
    return next((folder for folder in folders if _is_whole(folder)), None)


def _is_whole(folder: Path) -> bool:
    try:
        expected = msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, str])
        return bool(expected) and all(_checksum(folder / name) == checksum for name, checksum in expected.items())
    except (OSError, msgspec.DecodeError):
        return False


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _publish(building: Path, folder: Path) -> None:
    """Rename a built folder to its final name. Remove a damaged folder with that name first."""
    if _is_whole(folder):
        return  # another process has built the same folder meanwhile
    if folder.exists():
        log.warning("built-in model damaged, built anew", extra={"folder": str(folder)})
        away = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
        try:
            with suppress(FileNotFoundError):  # another process has just removed the damaged folder
                folder.rename(away / folder.name)
        finally:
            shutil.rmtree(away, ignore_errors=True)
    try:
        building.rename(folder)
    except OSError:
        if not _is_whole(folder):
            raise


def _training_text() -> list[str]:
    """Return Python's reference documentation, as shipped for `help()`: half a megabyte of prose and code."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [topics[name] for name in sorted(topics)]


def _digest_of_recipe(text: list[str]) -> str:
    digest = hashlib.sha256(msgspec.json.encode([CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS]))
    digest.update(f"{WEIGHTS_SEED} {WEIGHTS_STD}".encode())
    for part in text:
        digest.update(part.encode())
    return digest.hexdigest()[:12]


def _write_tokenizer(folder: Path, text: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    bos = SPECIAL_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    # Tokenizer.save raises a bare Exception when the disk is full, so write the file here.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def _weights() -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors under the names of Hugging Face's Llama; matrices have the shape `[out, in]`."""
    generator = np.random.default_rng(WEIGHTS_SEED)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(WEIGHTS_STD)

    ones = np.ones(HIDDEN, dtype=np.float32)
    yield "model.embed_tokens.weight", normal(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.self_attn.q_proj.weight", normal(HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", normal(HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.post_attention_layernorm.weight", ones
        yield f"{prefix}.mlp.gate_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", normal(HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", ones
    yield "lm_head.weight", normal(VOCABULARY, HIDDEN)


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
