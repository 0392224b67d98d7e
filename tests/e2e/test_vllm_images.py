"""Tests of images with a real vLLM engine on the CPU, through the clients of OpenAI and Anthropic."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import anthropic
import openai
import pytest

from tests.support.fleet_processes import fleet_up

if find_spec("vllm") is not None:
    from tests.support.workers.vision_model import IMAGE_TOKENS, LONGEST, MARKERS, an_image, build_vision_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300  # 25 to 60 on two idle cores
QUESTION = "Which color has this?"


class ImageSite(BaseHTTPRequestHandler):
    """Serves an image for each color: /red, /blue and so on."""

    def do_GET(self) -> None:
        content = an_image(self.path.removeprefix("/"))
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site():
    """Return ``host:port`` of a web server with images."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ImageSite) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, site):
    """Start a prefill and a decode worker with a store, as `fleet up` does, and a router that fetches images of `site`."""
    folder = tmp_path_factory.mktemp("vision")
    model = build_vision_model(folder / "model")
    topology = folder / "topology.toml"
    topology.write_text(f'[router.images]\nfetch_urls = true\nhosts = ["{site}"]\nnetworks = ["127.0.0.0/8"]\n')
    options = (
        "--config",
        str(topology),
        "--model",
        str(model),
        "--served-model-name",
        "tiny",
        "--max-model-len",
        str(LONGEST),
    )
    with fleet_up(folder, *options, engine="vllm", ready_seconds=READY_SECONDS) as up:
        yield up


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.endpoints['http']}/v1", api_key="none", max_retries=0, timeout=120) as it:
        yield it


def in_base64(color: str, kind: str = "PNG") -> str:
    return base64.b64encode(an_image(color, kind=kind)).decode()


def a_message(*colors: str, text: str = QUESTION) -> dict:
    images = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(color)}"}} for color in colors
    ]
    return {"role": "user", "content": [{"type": "text", "text": text}, *images]}


def ask(client, *colors: str, **fields):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": [a_message(*colors)], "max_tokens": 12, "temperature": 0, **fields}
    )


def text_of(answer) -> str:
    return answer.choices[0].message.content


def test_answer_depends_on_the_image_and_counts_its_tokens(client):
    red, again, blue = ask(client, "red"), ask(client, "red"), ask(client, "blue")
    plain = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=1, temperature=0
    )

    assert text_of(red) == text_of(again) != text_of(blue)
    assert red.usage.prompt_tokens == plain.usage.prompt_tokens + IMAGE_TOKENS + MARKERS
    assert red.usage.completion_tokens == 12


def test_streamed_answer_is_the_whole_one(client):
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(client, "red", "blue", stream=True) if chunk.choices
    )

    assert streamed == text_of(ask(client, "red", "blue"))


def test_several_answers_to_an_image_count_its_tokens_once(client):
    one, several = ask(client, "green"), ask(client, "green", n=2)

    assert [choice.message.content for choice in several.choices] == [text_of(one)] * 2
    assert several.usage.prompt_tokens == one.usage.prompt_tokens


def test_responses_and_messages_take_images_as_chats_do(cluster, client):
    expected = text_of(ask(client, "red"))
    parts = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": f"data:image/png;base64,{in_base64('red')}"},
    ]
    response = client.responses.create(
        model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=12, temperature=0
    )
    source = {"type": "base64", "media_type": "image/png", "data": in_base64("red")}
    blocks = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=cluster.endpoints["http"], api_key="none", max_retries=0, timeout=120) as other:
        message = other.messages.create(
            model="tiny",
            max_tokens=12,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )

    assert response.output_text == expected
    assert message.content[0].text == expected


def test_image_at_a_url_is_answered_as_the_same_in_the_request(client, site):
    part = {"type": "image_url", "image_url": {"url": f"http://{site}/red"}}
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}, part]}

    sent, fetched = ask(client, "red"), ask(client, messages=[message])

    assert text_of(fetched) == text_of(sent)
    assert fetched.usage.prompt_tokens == sent.usage.prompt_tokens


def test_undecodable_image_is_refused_and_the_next_is_served(client):
    damaged = base64.b64encode(an_image("red")[:60]).decode()  # its head is good, so only the worker can see it
    message = {"role": "user", "content": [{"type": "image_url", "image_url": f"data:image/png;base64,{damaged}"}]}

    with pytest.raises(openai.BadRequestError, match="image 1 of the prompt cannot be decoded") as refused:
        ask(client, messages=[message])

    assert refused.value.param == "messages"
    assert text_of(ask(client, "red"))
