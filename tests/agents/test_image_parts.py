"""Images in messages of turns: every form in which they come, what is refused, and that each is kept once."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from megatron_rl.agents.anthropic_messages import AnthropicMessages
from megatron_rl.agents.image_parts import EpisodeImages, content_of, key_of
from megatron_rl.agents.observation import Observation, TextLimit, observation_of
from megatron_rl.agents.openai_chat import OpenAIChat


def encoded(kind: str, shade: int = 7) -> bytes:
    Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(content := io.BytesIO(), kind)
    return content.getvalue()


PNG, JPEG, WEBP = map(encoded, ("PNG", "JPEG", "WEBP"))
CODED = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{CODED}"
PART = {"type": "image", "image": key_of(PNG)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL.replace("data:image/png", "Data:Image/PNG")}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED}},
        {"type": "image", "image": PNG},
        {"type": "image", "image": URL},
    ],
)
def test_every_form_is_the_same_part(part) -> None:
    """Would not catch a form that a client sends and nobody has listed."""
    images: dict[str, bytes] = {}
    text = {"type": "text", "text": "look"}
    assert content_of("content", [text, part, part], images) == [text, PART, PART]
    assert images == {key_of(PNG): PNG}


@pytest.mark.parametrize(
    ("image", "rule"),
    [
        ("http://127.0.0.1/a.png", "nothing is fetched"),
        ("https://example.org/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("", "nothing is fetched"),
        ("data:image/png,abc", "must be data:image/png;base64"),
        ("data:image/png;base64", "must be data:image/png;base64"),
        (URL[:-3], "no base64"),
        ("data:image/png;base64,@@@@", "no base64"),
        ("data:image/png;base64,", "begins with b''"),
        (f"data:image/gif;base64,{CODED}", "image/gif are not read"),
        (f"data:text/html;base64,{CODED}", "text/html are not read"),
        (f"data:image/jpeg;base64,{CODED}", "as no such file does"),
        ("data:image/webp;base64," + base64.b64encode(b"RIFF0000WAVE").decode(), "as no such file does"),
        (b"GIF89a", "as no such file does"),
        ({"type": "url", "url": "http://127.0.0.1/a.png"}, "it is a url"),
        ({"type": "base64", "media_type": "image/png", "data": None}, "must be text"),
        (5, "it is a int"),
        (np.zeros((2, 2, 7, 3)), "cannot be written"),
        (np.zeros((8, 8, 3), complex), "cannot be written"),
        (np.broadcast_to(np.uint8(0), (8001, 8000, 3)), "8001 x 8000 pixels; at most 64,000,000"),
    ],
)
def test_what_is_no_image_has_a_rule(image, rule: str) -> None:
    """Would not catch an image that decodes to a bomb: that is refused where it is decoded."""
    images: dict[str, bytes] = {}
    with pytest.raises(ValueError, match=rule):
        content_of("content", [{"type": "image", "image": image}], images)
    assert images == {}


def test_protocols_read_images() -> None:
    """Both protocols, results of tools among them, and neither in a run that reads text. Would not catch a message
    whose image stands at another place.
    """
    shown = {"type": "image_url", "image_url": {"url": URL}}
    chat = {"messages": [{"role": "user", "content": [shown]}, {"role": "tool", "content": [shown]}]}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    sent = {"messages": [{"role": "user", "content": [block, result]}], "max_tokens": 3}
    for protocol, body in ((OpenAIChat(), chat), (AnthropicMessages(), sent)):
        images: dict[str, bytes] = {}
        contents = [message["content"] for message in protocol.read(body, images).messages]
        assert contents == [[PART], [PART]] and images == {key_of(PNG): PNG}
        with pytest.raises(ValueError, match=r"data\.image_key"):
            protocol.read(body)
    own = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [shown]}]}
    with pytest.raises(ValueError, match="own messages have none"):
        OpenAIChat().read(own, {})


def test_observations_show_images() -> None:
    """Bytes, PIL and arrays; a text next to an image is cut and the image is not. Would not catch an image that a
    later observation shows again and that is sent again.
    """
    pixels = np.full((8, 8, 3), 7, np.uint8)
    given = [PNG, Image.fromarray(pixels), pixels]
    content = [*({"type": "image", "image": image} for image in given), {"type": "text", "text": "x" * 90}]
    images: dict[str, bytes] = {}
    known = observation_of(([{"role": "user", "content": content}], 0.0, False), TextLimit(4, "left"), images)
    *shown, text = known.messages[0]["content"]
    assert shown == [PART] * 3 and text["text"] == "xxxx...(truncated)..." and images == {key_of(PNG): PNG}
    with pytest.raises(ValueError, match=r"data\.image_key"):
        observation_of(Observation(({"role": "user", "content": content},)), TextLimit(4))


def test_an_episode_keeps_each_image_once() -> None:
    """Images of earlier requests are neither kept nor sent again, and all together have a limit. Would not catch two
    episodes that share what they have sent.
    """
    images = EpisodeImages(most_bytes=len(PNG) + len(JPEG))
    for _ in range(100):
        images.add({key_of(PNG): PNG})
    assert images.take() == {key_of(PNG): CODED} and images.take() == {}
    images.add({key_of(PNG): PNG, key_of(JPEG): JPEG})
    assert list(images.take()) == [key_of(JPEG)]
    with pytest.raises(ValueError, match="at most"):
        images.add({key_of(WEBP): WEBP})
    assert images.take() == {}
