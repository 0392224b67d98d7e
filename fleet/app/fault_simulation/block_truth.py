"""Block truth: computes the right bytes of every block and the right tokens of every answer without the cluster.

The fault simulation compares the blocks and answers of the cluster with these bytes and tokens. The module also defines
the sizes of the simulated engine.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import structs

from fleet.batching.attempts import EngineLimits
from fleet.core.ids import ModelName, StoreId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Sampling, TokenBytes
from fleet.core.roles import KvPath
from kvstore.block import BlockHash, chain
from kvstore.layouts.fingerprint import describe
from kvstore.namespace import KvNamespace
from workers.engines.simulated.answer_oracle import AnswerOracle
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.model import SimulatedModel
from workers.engines.simulated.sequence import SequenceContext
from workers.ports import EngineFacts

MODEL = ModelName("model")
STORE_ID = StoreId("store")
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 512
KV_BLOCKS = 40
LAYERS, KV_HEADS, HEAD_BYTES = 1, 2, 4
BLOCK_BYTES = BLOCK_TOKENS * LAYERS * KV_HEADS * HEAD_BYTES

SIMULATED_MODEL = SimulatedModel(
    seed=0, vocab_size=4096, eos_token_ids=(2,), eos_probability=0.0, block_bytes=BLOCK_BYTES
)
LAYOUT = EngineLayout(
    layers=LAYERS,
    kv_heads=KV_HEADS,
    block_tokens=BLOCK_TOKENS,
    head_bytes=HEAD_BYTES,
    tensor_parallel=1,
    kv_layout="HND",
)
NAMESPACE = KvNamespace(
    model=MODEL,
    revision="1",
    dtype="simulated",
    block_tokens=BLOCK_TOKENS,
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_BYTES,
    block_bytes=BLOCK_BYTES,
)
KV = describe(NAMESPACE, layout=LAYOUT.axes, tp=1)
DIGEST = NAMESPACE.digest
SHAPE = SequenceContext(model=SIMULATED_MODEL, layout=LAYOUT, block_tokens=BLOCK_TOKENS, max_model_len=MAX_MODEL_LEN)
LIMITS = EngineLimits(kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, max_running=4, step_tokens=128)
FACTS = EngineFacts(
    name="simulated 1",
    model=MODEL,
    block_tokens=BLOCK_TOKENS,
    max_model_len=MAX_MODEL_LEN,
    kv_blocks=KV_BLOCKS,
    max_running=LIMITS.max_running,
    fingerprint=NAMESPACE.fingerprint,
    kv_paths=(KvPath.STORE, KvPath.DIRECT),
    store_id=STORE_ID,
    kv=KV,
)
"""Properties of the workers outside `REBUILDING_WORKERS`, which cannot continue an answer with sampling state."""
REBUILDING_FACTS = structs.replace(FACTS, continued_fields=("frequency_penalty",))
REBUILDING_WORKERS = frozenset({WorkerId("d0"), WorkerId("b0")})
"""Workers with `REBUILDING_FACTS`, which can continue answers with a frequency penalty."""

_ORACLE = AnswerOracle(SIMULATED_MODEL, BLOCK_TOKENS)


@lru_cache(1024)
def answer(prompt: TokenBytes, sampling: Sampling) -> tuple[int, ...]:
    """Return the whole answer that a correct cluster must give to a prompt."""
    return _ORACLE.answer(prompt, sampling)


class BlockTruth:
    """Holds the right bytes of all blocks of a run, by block hash, so that wrong blocks can be found."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, bytes] = {}

    def learn(self, prompt: TokenBytes, answer_tokens: Sequence[int]) -> None:
        """Compute and keep the right bytes of the blocks of a prompt and its answer."""
        self._blocks.update(_blocks(prompt + b"".join(each.to_bytes(TOKEN_BYTES, "little") for each in answer_tokens)))

    def is_right(self, name: BlockHash, content: bytes) -> bool:
        return self._blocks.get(name) == content


@lru_cache(1024)
def _blocks(text: bytes) -> dict[BlockHash, bytes]:
    digest, size = SIMULATED_MODEL.beginning, BLOCK_TOKENS * TOKEN_BYTES
    blocks: dict[BlockHash, bytes] = {}
    for position, name in enumerate(chain(text, BLOCK_TOKENS)):
        values = SIMULATED_MODEL.compute(digest, text[position * size : (position + 1) * size])
        digest = SIMULATED_MODEL.read(digest, values)
        blocks[name] = LAYOUT.lay_out(values)
    return blocks
