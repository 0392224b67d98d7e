"""Model folders for tests, with the files that a router reads: tokenizer, chat template, end-of-sequence ids."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<s>", "</s>", "<|end|>")
BOS, EOS, END = 0, 1, 2
TEXT = (
    "the quick brown fox jumps over the lazy dog while once upon a time there was a small village by the sea",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; où est le café naïf?",
    "いろはにほへと ちりぬるを 漢字かな交じり文 한국어 텍스트 русский текст עברית 🎉🎊👩‍👩‍👧",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}\n",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(folder: Path, *, vocabulary: int = 500) -> Path:
    """Write a model folder with a byte-level tokenizer, as Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT * 4,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return _write(folder, tokenizer)


def write_seeing_model(folder: Path) -> Path:
    """Write a model folder of a model that takes images; the token `END` is the placeholder of an image."""
    write_model(folder)
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{% if part.type == 'image' %}<|end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": END}))
    return folder


def write_sentencepiece_model(folder: Path, *, vocabulary: int = 500) -> Path:
    """Write a model folder whose tokenizer has a space marker and byte fallback, as Llama 2 and Mistral have it."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained.train_from_iterator(
        [text for text in TEXT if text.isascii()] * 4,
        trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL, "<unk>", *bytes_], show_progress=False),
    )
    content = json.loads(trained.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in bytes_]
    return _write(folder, Tokenizer.from_str(json.dumps(content)))


def _write(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    write_json(folder / "config.json", {"model_type": "llama", "vocab_size": size, "eos_token_id": EOS})
    write_json(folder / "generation_config.json", {"eos_token_id": [EOS, END]})
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": CHAT_TEMPLATE},
    )
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
