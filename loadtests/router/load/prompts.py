"""Requests of the benchmark, as the bytes that go over the wire.

Words come from the text that the tiny model's tokenizer was trained on. A token of this tokenizer never spans two words, so the
number of tokens of a prompt is the sum over its words. Only the number of tokens of the unique beginning is approximate.
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
WORDS = 3000  # number of the most frequent words that are used
TEXTS = 32  # number of different texts that follow the unique beginnings of prompts
STAMP_TOKENS = 16  # approximate length of the unique beginning: 16 hexadecimal digits and the start token
MIX = 0x9E3779B97F4A7C15  # odd, so that its multiples are distinct 64-bit numbers


def model_with_long_context(tiny: Path, folder: Path) -> Path:
    """Copy the tiny model's tokenizer with a longer maximum length."""
    copied = folder / MODEL
    shutil.copytree(tiny, copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        content = json.loads((copied / name).read_text())
        (copied / name).write_text(json.dumps({**content, field: CONTEXT_TOKENS}))
    return copied


class Vocabulary:
    """The words of which prompts are made, with the number of tokens of each word."""

    def __init__(self, model_dir: Path):
        """Read the words of the tiny model in a folder."""
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
        """Return random words until they have at least `tokens` tokens. The text begins with a space."""
        words = []
        left = tokens
        while left > 0:
            word = chance.choice(self._words)
            words.append(word)
            left -= self._tokens[word]
        return "".join(words)


def request(prompt: str, answer_tokens: int) -> bytes:
    """Return the bytes of an HTTP request for a streamed completion."""
    fields = {"model": MODEL, "stream": True, "max_tokens": answer_tokens, "temperature": 0, "prompt": prompt}
    body = json.dumps(fields, separators=(",", ":")).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class NewPrompts:
    """Makes requests whose prompts differ from the first characters on.

    Everything but the unique beginning is prepared in advance, so that a request costs the client little CPU time.
    """

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
    """Requests of users who have one conversation after the other; each turn repeats the text of the turns before."""

    def __init__(self, sharing: PrefixSharing, vocabulary: Vocabulary, seed: int):
        self._sharing = sharing
        self._vocabulary = vocabulary
        self._seed = seed
        chance = random.Random(seed)
        self._openings = [vocabulary.text(sharing.opening_tokens, chance) for _ in range(sharing.groups)]

    def of(self, user: str) -> Iterator[bytes]:
        """Yield the requests of a user without end. The same name always gets the same requests.

        Args:
            user: Any name that identifies user and round.
        """
        chance = random.Random(f"{self._seed} {user}")
        while True:
            prompt = chance.choice(self._openings)
            for _ in range(self._sharing.turns):
                prompt += self._vocabulary.text(self._sharing.turn_tokens, chance)
                yield request(prompt, 1)
