"""Tiny model for images in tests with vLLM: an Idefics3 with random weights, and its answers by transformers."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from fleet.local.tiny_model import CONFIG, GENERATION_CONFIG, build_tiny_model

SIDE, PATCH, SCALE = 64, 8, 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2  # tokens of one image, without the markers around them
MARKERS = 3  # tokens around the tokens of an image
NEW_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
LONGEST = 512  # maximum number of tokens of a prompt and its answer

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_vision_model(folder: Path) -> Path:
    """Write the model into `folder`; the tokenizer is that of the built-in tiny model, with four tokens more."""
    torch.manual_seed(20_26)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(build_tiny_model(folder.parent / "llama")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(NEW_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = {name: CONFIG[name] for name in CONFIG.keys() - {"architectures", "model_type", "torch_dtype"}}
    text = LlamaConfig(**{**shape, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "pad_token_id": 1})
    vision = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.08)  # a wide range of weights, so that images change the answer
    model.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=IMAGE_TOKENS).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return folder


def an_image(color: str, size: tuple[int, int] = (48, 40), kind: str = "PNG") -> bytes:
    """Return the content of an image file with one color."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def answer_of_transformers(folder: Path, text: str, images: Sequence[bytes], tokens: int) -> list[int]:
    """Return the first `tokens` token ids of the greedy answer of transformers; `text` has a placeholder ``<image>`` for each image."""
    processor: Any = Idefics3Processor.from_pretrained(folder)
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    decoded = [Image.open(io.BytesIO(each)) for each in images]
    inputs = processor(text=text, images=[decoded], add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    answer: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return answer
