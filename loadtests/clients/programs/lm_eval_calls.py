"""Runs lm-eval against a server, with tasks that this script defines: scoring of choices, texts up to a stop string, and chats.

Usage: python lm_eval_calls.py URL MODEL MODEL_FOLDER SCRATCH. It prints a JSON object per call. Run it in the environment of lm-eval.
"""

import json
import sys
from functools import partial
from pathlib import Path

from reporting import CallFailed, report_calls, run_command

QUESTIONS = [
    {
        "question": f"The sky number {number} is",
        "choices": [" blue", " green", " a cat"],
        "answer": number % 3,
        "word": "blue",
    }
    for number in range(6)
]
CHOICES = """
task: fleet_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WORDS = """
task: fleet_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{until: ["."], max_gen_toks: 8, temperature: 0}}
doc_to_text: "{{{{question}}}}"
doc_to_target: word
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
RUNS = {
    "local-completions multiple choice": ("local-completions", "completions", "fleet_choices", "4", ()),
    "local-completions generation": ("local-completions", "completions", "fleet_words", "1", ()),
    "local-chat-completions generation": (
        "local-chat-completions",
        "chat/completions",
        "fleet_words",
        "1",
        ("--apply_chat_template",),
    ),
}


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    folder = Path(scratch)
    data = folder / "questions.jsonl"
    data.write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    for name, text in (("choices", CHOICES), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    report_calls({call: partial(run, call, url, model, model_folder, folder) for call in RUNS})


def run(call: str, url: str, model: str, model_folder: str, folder: Path) -> bool:
    """Run one task; return True if lm-eval prints its results.

    Raises:
        CallFailed: lm-eval prints no results, or does not end in time.
    """
    kind, path, task, batch, more = RUNS[call]
    arguments = [f"model={model}", f"base_url={url}/{path}", "num_concurrent=1", "max_retries=1"]
    arguments += [
        f"tokenizer={model_folder}",
        "tokenizer_backend=huggingface",
        f"tokenized_requests={'chat' not in path}",
    ]
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", ",".join(arguments)]
    command += ["--tasks", task, "--include_path", str(folder), "--batch_size", batch, *more]
    command += ["--output_path", str(folder / f"out-{task}-{kind}")]
    done = run_command(command, {})
    if done.returncode or task not in done.stdout:
        raise CallFailed((done.stderr or done.stdout)[-280:])
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
