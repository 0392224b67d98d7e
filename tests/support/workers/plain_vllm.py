"""Plain vLLM in a process of its own: computes the results with which tests compare those of Fleet's workers.

Usage: python -m tests.support.workers.plain_vllm CASES.json ANSWERS.json
"""

import json
import os
import sys
from pathlib import Path


def main(cases: Path, answers: Path) -> None:
    """Compute for each case (a model folder and inputs) the vectors of prompts of token ids, or the scores of pairs of texts."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1"
    )
    # The engine runs in this process, because a process for each model would import vLLM again (10 s).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    found = []
    for case in json.loads(cases.read_text()):
        llm = LLM(
            model=case["model"],
            runner="pooling",
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 26,
        )
        if "pairs" in case:
            found.append([llm.score(first, second)[0].outputs.score for first, second in case["pairs"]])
        else:
            outputs = llm.embed([{"prompt_token_ids": ids} for ids in case["tokens"]])
            found.append([each.outputs.embedding for each in outputs])
        llm.llm_engine.engine_core.shutdown()
        del llm
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
