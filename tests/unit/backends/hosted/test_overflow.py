"""Which requests may overflow to a hosted endpoint."""

import base64

import msgspec
import pytest

from fleet.backends.hosted.overflow import answers_alike
from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.frontend.openai.requests import read_chat
from fleet.router.settings.overflow import OverflowSettings
from tests.support.servers.images import an_image

IMAGE = "data:image/png;base64," + base64.b64encode(an_image()).decode()


def a_chat(*parts):
    content = [{"type": "text", "text": "What is this?"}, *parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 5}
    return read_chat(msgspec.json.encode(body), RequestId("r"), Nanos(0))


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("url", [IMAGE, "https://images.test/a.png"])
def test_request_with_images_never_overflows(extended, url):
    settings = OverflowSettings(
        url="https://api.test",
        hosted_model="big",
        api_key_file="/key",
        dollars_per_hour=1.0,
        dollars_per_million_prompt_tokens=1.0,
        dollars_per_million_answer_tokens=1.0,
        extended_fields=extended,
    )

    assert answers_alike(a_chat(), settings)
    assert not answers_alike(a_chat({"type": "image_url", "image_url": {"url": url}}), settings)
