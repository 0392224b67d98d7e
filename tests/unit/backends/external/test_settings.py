"""External backends in router settings: each error is one line with the key."""

import pytest

from fleet.config import load
from fleet.core.errors import ConfigurationRefused
from fleet.router.settings.router import RouterSettings

WORKER = '[[openai_workers]]\nworker_id = "w0"\nurl = "http://127.0.0.1:9001"\nmodel = "mock"\n'


def test_a_short_section_is_enough(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text(WORKER)

    (worker,) = load(file, RouterSettings).openai_workers

    assert (worker.block_tokens, worker.kv_blocks, worker.max_running, worker.compared_tokens) == (16, 100_000, 256, 64)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WORKER.replace("http://127.0.0.1:9001", "127.0.0.1:9001"), "openai_workers[0]: url: '127.0.0.1:9001'"),
        (WORKER.replace(":9001", ":90010"), "url: 'http://127.0.0.1:90010'"),
        (WORKER.replace("http:", "ftp:"), "url: 'ftp:"),
        (WORKER.replace("127.0.0.1", "gpu..local"), "url: 'http://gpu..local:9001'"),
        (WORKER.replace("9001", "9001/\\r\\nx: y"), "openai_workers[0]: url"),
        (WORKER + 'api_key = "a\\nb"\n', "only printable ASCII"),
        (WORKER + "max_running = 0\n", "openai_workers[0].max_running"),
        (WORKER + "colour = 1\n", "openai_workers[0].colour: is not a known key"),
        (WORKER + 'kv_events = "tcp://127.0.0.1:1"\n', "kv_events: needs tokenizer"),
        (WORKER + 'kv_events = "127.0.0.1:1"\n', "openai_workers[0].kv_events"),
        (WORKER + 'tokenizer = "x"\nkv_events = "tcp://*:5557"\n', "openai_workers[0].kv_events"),
        (WORKER + 'tokenizer = "x"\nkv_events = "tcp://127.0.0.1"\n', "openai_workers[0].kv_events"),
        (WORKER + 'kv_events_replay = "tcp://127.0.0.1:1"\n', "kv_events_replay: needs kv_events"),
        (WORKER + 'adapters = ["mock"]\n', "openai_workers[0].adapters: 'mock' is a model"),
        (WORKER + 'adapters = [""]\n', "openai_workers[0].adapters[0]"),
        (WORKER + "kv_blocks = 1\n", "kv_blocks: 1 of 16 tokens"),
        (WORKER + WORKER, "openai_workers[1].worker_id: 'w0' is already openai_workers[0]"),
        (WORKER + WORKER.replace("w0", "w1") + 'tokenizer = "x"\n', "openai_workers[1]: workers of one model need"),
        ('models = {mock = "x"}\n' + WORKER, "openai_workers[0].model: 'mock' is in `models`"),
        (WORKER.replace('model = "mock"\n', ""), "missing required field `model`"),
    ],
)
def test_wrong_setting_is_reported_in_one_line_with_its_key(tmp_path, content, said):
    file = tmp_path / "router.toml"
    file.write_text(content)

    with pytest.raises(ConfigurationRefused) as refused:
        load(file, RouterSettings)

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
