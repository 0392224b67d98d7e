"""Repository names, the files to download, and the fingerprints of downloaded weights."""

import os

import pytest

from fleet.app.hub_download import lacking, wanted
from fleet.core.hub import HubSettings, Repository, parse_repository
from workers.engines import weights
from workers.rank_rendezvous import common_settings_digest
from workers.settings import GroupSettings, WorkerSettings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = [
    *("README.md", ".gitattributes", "LICENSE.txt", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors", "pytorch_model.bin"),
    *("consolidated.safetensors", "original/consolidated.00.pth", "onnx/model.safetensors", "preprocessor_config.json"),
]


@pytest.mark.parametrize(
    ("named", "repository"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", Repository("meta-llama/Llama-3.3-70B-Instruct")),
        ("Qwen/Qwen3-0.6B@v1.0", Repository("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/4", Repository("a/b", "refs/pr/4")),
        (f"a/b@{COMMIT}", Repository("a/b", COMMIT)),
        *(
            (text, None)
            for text in ("", "tiny", "/models/llama", "./a/b", "../b", "a/b/c", "a/b@", "~/b", "a b/c", "a/b\n")
        ),
    ],
)
def test_a_repository_is_an_owner_and_a_name(named, repository):
    assert parse_repository(named) == repository


def test_only_a_whole_commit_pins_a_revision():
    assert [Repository("a/b", revision).is_pinned for revision in (COMMIT, COMMIT[:12], "main", "v1")] == [True] + 3 * [
        False
    ]


def test_router_needs_no_weights_and_worker_one_form():
    assert wanted(FILES, weights=False) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "special_tokens_map.json"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
    ]
    fetched = wanted(FILES, weights=True)
    assert [name for name in fetched if name.endswith((".safetensors", ".bin", ".pth"))] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]
    assert set(wanted(FILES, weights=False)) | {"model.safetensors.index.json", "preprocessor_config.json"} < set(
        fetched
    )
    assert wanted(["config.json", "consolidated.safetensors"], weights=True)[-1] == "consolidated.safetensors"


@pytest.mark.parametrize(
    ("names", "of_engine", "lack"),
    [
        (["config.json", "a.safetensors"], True, ""),
        (["config.json", "tokenizer.json"], False, ""),
        (["config.json"], True, "*.safetensors weights"),
        (["config.json"], False, "tokenizer.json"),
        ([], True, "config.json"),
    ],
)
def test_incomplete_repository_is_noticed_before_download(names, of_engine, lack):
    assert lacking(names, weights=of_engine) == lack


def test_fingerprint_of_large_weights_is_equal_on_two_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "WHOLE_CONTENT_BYTES", 0)

    def fetched(host, name, age):
        """Make a weights file in the folder layout of the Hugging Face client; return the fingerprint of the weights."""
        blob, link = tmp_path / host / "blobs" / name, tmp_path / host / "snapshots" / "c" / "model.safetensors"
        blob.parent.mkdir(parents=True)
        link.parent.mkdir(parents=True)
        blob.write_bytes((2).to_bytes(8, "little") + b"{}")
        os.utime(blob, (age, age))
        link.symlink_to(blob)
        return weights.revision_of([link])

    here = fetched("a", "1" * 64, 1000)
    assert fetched("b", "1" * 64, 2000) == here
    assert fetched("c", "2" * 64, 1000) != here
    assert fetched("d", "model-of-mine", 1000) != fetched("e", "model-of-mine", 2000)


def test_ranks_of_a_group_may_use_different_caches():
    def common(**hub):
        group = GroupSettings(nodes=2, leader="127.0.0.1:1")
        return common_settings_digest(WorkerSettings(worker_id="w", model="m", group=group, hub=HubSettings(**hub)))

    assert common(cache="/a") == common(cache="/b", token_file="/t")
