"""Requests, as the bytes that go over the wire.

Words come from the text that the tiny model's tokenizer was trained on. Its tokens never span two words, so the tokens of
a prompt are the sum of its words' and every prompt has the length that it is said to have, but for its unique beginning.
"""

import importlib
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from loadtests.router.scenarios import PrefixSharing, RouterScenario

MODEL = "tiny"
PATH = "/v1/completions"
CONTEXT_TOKENS = 1 << 17
WORDS = 3000  # the most frequent ones
TEXTS = 32  # different ones among the prompts of a scenario, besides their beginnings
STAMP_TOKENS = 16  # about; 16 hexadecimal digits, and what the tokenizer puts before all
MIX = 0x9E3779B97F4A7C15  # odd, so that counting times it meets every 64-bit number once


def model_with_long_context(tiny: Path, folder: Path) -> Path:
    """A copy of the tiny model's tokenizer that says of itself that prompts may be long."""
    copied = folder / MODEL
    shutil.copytree(tiny, copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        content = json.loads((copied / name).read_text())
        (copied / name).write_text(json.dumps({**content, field: CONTEXT_TOKENS}))
    return copied


class Vocabulary:
    """Words with their numbers of tokens."""

    def __init__(self, model_dir: Path):
        """Those of the tiny model, which is in that folder."""
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        found = Counter(word for name in sorted(topics) for word in re.findall(r"[A-Za-z]{2,12}", topics[name]))
        self._words = [f" {word}" for word, _ in found.most_common(WORDS)]
        self._tokens = {
            word: len(encoding.ids)
            for word, encoding in zip(
                self._words, tokenizer.encode_batch(self._words, add_special_tokens=False), strict=True
            )
        }

    def text(self, tokens: int, chance: random.Random) -> str:
        """Words that are so many tokens, or one or two more; begins with a space."""
        words = []
        left = tokens
        while left > 0:
            word = chance.choice(self._words)
            words.append(word)
            left -= self._tokens[word]
        return "".join(words)


def request(prompt: str, answer_tokens: int) -> bytes:
    """One streamed completion."""
    fields = {"model": MODEL, "stream": True, "max_tokens": answer_tokens, "temperature": 0, "prompt": prompt}
    body = json.dumps(fields, separators=(",", ":")).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class NewPrompts:
    """Requests with prompts that differ from the first character on; all but that is made beforehand."""

    def __init__(self, scenario: RouterScenario, vocabulary: Vocabulary, seed: int):
        chance = random.Random(seed)
        stamp = "0" * 16
        self._halves = []
        for _ in range(TEXTS):
            text = vocabulary.text(max(1, scenario.prompt_tokens - STAMP_TOKENS), chance)
            before, _, after = request(stamp + text, scenario.answer_tokens).partition(stamp.encode())
            self._halves.append((before, after))
        self._numbers = count(seed << 40)

    def next(self) -> bytes:
        number = next(self._numbers)
        before, after = self._halves[number % TEXTS]
        return b"%b%016x%b" % (before, number * MIX & 0xFFFF_FFFF_FFFF_FFFF, after)


class Conversations:
    """Requests of somebody who holds one conversation after the other, turn by turn."""

    def __init__(self, sharing: PrefixSharing, vocabulary: Vocabulary, seed: int):
        self._sharing = sharing
        self._vocabulary = vocabulary
        self._seed = seed
        chance = random.Random(seed)
        self._openings = [vocabulary.text(sharing.opening_tokens, chance) for _ in range(sharing.groups)]

    def of(self, user: str) -> Iterator[bytes]:
        """Without end; the same for the same user.

        Args:
            user: Anything that tells users and rounds apart.
        """
        chance = random.Random(f"{self._seed} {user}")
        while True:
            prompt = chance.choice(self._openings)
            for _ in range(self._sharing.turns):
                prompt += self._vocabulary.text(self._sharing.turn_tokens, chance)
                yield request(prompt, 1)
