"""Turns that show images: their tokens and pieces, limits, hostile images, and what a journal and a checkpoint keep."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from itertools import count

import numpy as np
import pytest
import torch
from make_image_assets import save_processor, save_tokenizer
from PIL import Image
from transformers import AutoTokenizer
from vision_folders import IMAGE

from megatron_rl.agents.as_json import WithImages
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentsHere
from megatron_rl.agents.episode import Episode, EpisodeLimits, Reply, context_images, rows_of
from megatron_rl.agents.episodes import LiveEpisodes, RecordedEpisodes
from megatron_rl.agents.image_parts import EpisodeImages
from megatron_rl.agents.observation import EpisodeFailure, Observation, TextLimit, ToolCall, Turn
from megatron_rl.agents.tools import ToolSource
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.data.image_processor import ImageForms
from megatron_rl.data.prompt_images import PlaceholderIds, PromptImages
from megatron_rl.data.turn_images import FOLDER
from megatron_rl.images import key_of
from megatron_rl.records import Batch, Sampling, image_bytes, ragged_from_lengths
from megatron_rl.rollout.slices import Drawn
from megatron_rl.sampling.image_tensors import encoded_of_tensors, images_as_tensors, pieces_of_tensors
from megatron_rl.sampling.journal import from_json, reply_event, to_json

END = 1
PROMPT = tuple(range(3, 9))
SAID = Drawn((50, END), (-0.5, -0.5), "stop")


def png(*size: int, shade: int = 0) -> bytes:
    Image.fromarray(np.full((*size, 3), shade, np.uint8)).save(content := io.BytesIO(), "PNG")
    return content.getvalue()


def bomb() -> bytes:
    """A PNG whose header promises 30000 x 30000 pixels."""
    content = png(8, 8)
    header = b"IHDR" + struct.pack(">II", 30000, 30000) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


class Shows:
    """Environments that show images in their turn, and never end an episode."""

    opens = False

    def __init__(self) -> None:
        self.answers: list[WithImages | Observation] = []
        self.ready: list[tuple[int, WithImages | Observation]] = []

    def show(self, *images: bytes, text: str = "see") -> None:
        parts = [{"type": "text", "text": text}, *({"type": "image", "image": key_of(image)} for image in images)]
        answer = Observation(({"role": "user", "content": parts},))
        (sent := EpisodeImages()).add({key_of(image): image for image in images})
        self.answers.append(WithImages(answer, coded) if (coded := sent.take()) else answer)

    def play(self, number, job) -> None:
        self.ready.append((number, self.answers.pop(0)))

    def take(self, waits):
        ready, self.ready = self.ready, []
        return ready

    def forget(self, episode) -> None: ...


@pytest.fixture
def images(tmp_path):
    save_tokenizer(tmp_path)
    save_processor(tmp_path, 14)
    made = PromptImages(
        "images", ImageForms.of_folder(tmp_path, None, None, None), PlaceholderIds(IMAGE, (IMAGE,)), None
    )
    yield made
    made.close()


@pytest.fixture
def live(tmp_path, images) -> LiveEpisodes:
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    environments, rest = Shows(), (EpisodeLimits(99), 99, ["user"], images)
    return LiveEpisodes(environments, TurnRenderer(tokenizer, [END]), TurnReader(tokenizer), *rest)


def episode(most: int = 500) -> Episode:
    prompt = [{"role": "user", "content": "x"}]
    return Episode(PROMPT, {"prompt": prompt, "images": ()}, Sampling(1.0, 1.0, -1, most, 1), images=())


NUMBERS = count()


def played(live: LiveEpisodes, known: Episode, *shown: bytes, limits: EpisodeLimits | None = None, **more) -> Reply:
    """A turn of an episode, which is shown images."""
    live._environments.show(*shown, **more)
    known.extend(SAID, 0, has_turns=True)
    number = next(NUMBERS)
    live.submit(number, known)
    ((_, reply),) = live.take_of({number}, waits=True)
    assert from_json(to_json(reply_event(3, reply))).reply == reply
    known.take(reply, limits or live.limits)
    return reply


def check(known: Episode, *sizes: int) -> None:
    """Its pieces are the runs of placeholders in its tokens, of these sizes."""
    tokens = [*known.prompt_ids, *known.token_ids]
    assert [piece.num_tokens for piece in known.images] == list(sizes)
    assert [place for piece in known.images for place in range(piece.first, piece.stop)] == [
        place for place, token in enumerate(tokens) if token == IMAGE
    ]


def test_images_of_turns_are_runs_of_placeholders(live, images) -> None:
    """1, 2 and 4 tokens in two turns, one image again in the second: kept once. An episode that begins again has none.
    Would not catch features of another image: digests do.
    """
    known, (small, wide, large) = episode(), (png(28, 28), png(28, 56), png(56, 56))
    played(live, known, small, large)
    assert context_images(known) == known.images
    played(live, known, wide, *[small] * 100)
    check(known, 1, 4, 2, *[1] * 100)
    assert len({piece.digest for piece in known.images}) == 3 and len(images.turns._sizes) == 3
    assert not any(known.is_sampled[piece.first - len(PROMPT)] for piece in known.images)
    known.starts = [len(known.token_ids)]
    assert context_images(known) == ()
    known.resample()
    assert known.images == () and known.token_ids == []


def test_what_does_not_fit_ends_an_episode_before_its_image(live, images) -> None:
    """By tokens, by `limit_images`, and 10,000 images, none of which is read. Would not catch a cut of a text."""
    large = png(112, 112)
    for known, limits, shown in (
        (episode(60), None, [large, large]),
        (episode(), EpisodeLimits(99, max_images=1), [large, large]),
        (episode(), None, [large] * 10_000),
    ):
        played(live, known, png(28, 28), limits=limits)
        check(known, 1)
        before, reads = list(known.token_ids), len(images.turns._read)
        played(live, known, *shown, limits=limits)
        assert known.finish == "length" and known.token_ids == [*before, *SAID.token_ids]
        check(known, 1)
    assert reads == len(images.turns._read)


@pytest.mark.parametrize(
    ("image", "text", "rule"),
    [
        (png(56, 56)[:-40], "see", "cannot be used"),
        (png(56, 56)[:45] + bytes(40), "see", "cannot be used"),
        (bomb(), "see", "decompression bomb"),
        (png(1, 1), "see", "1 x 1 pixels"),
        (b"\x89PNG\r\n\x1a\n", "see", "cannot be used"),
        (png(28, 28), "<|image_pad|>", "tokens that stand for images"),
        (png(28, 28), "<|image_pad|>" * 99, "tokens that stand for images"),
    ],
    ids=["cut", "damaged", "bomb", "tiny", "empty", "placeholder", "placeholders"],
)
def test_a_hostile_image_costs_its_own_episode(live, image: bytes, text: str, rule: str) -> None:
    """Would not catch one that takes 30 s of CPU time."""
    bad, good = episode(), episode()
    reply = played(live, bad, image, text=text)
    assert bad.finish == "failed" and isinstance(reply.answer, EpisodeFailure) and rule in reply.answer.reason
    played(live, good, png(28, 28))
    check(good, 1)


def test_images_that_nobody_sent_or_that_a_run_of_text_gets(live, images) -> None:
    """A key without an image, an image under another key, and a run that reads text. Would not catch a key that another
    episode has shown: it is that image.
    """
    live._environments.answers.append(Observation(({"role": "user", "content": part("image-" + "0" * 32)},)))
    for sent, rule in (({}, "no environment has shown"), ({key_of(b"x"): "eQ=="}, "is not the key")):
        live._environments.show()
        live._environments.answers[-1] = WithImages(
            Observation(({"role": "user", "content": part("image-" + "0" * 32)},)), sent
        )
        known = episode()
        known.extend(SAID, 0, has_turns=True)
        live._environments.answers = live._environments.answers[-1:]
        live.submit(0, known)
        ((_, reply),) = live.take_of({0}, waits=True)
        assert rule in reply.answer.reason
    live._images = None
    assert "data.image_key" in played(live, episode(), png(28, 28)).answer.reason


def part(key: str) -> list[dict[str, str]]:
    return [{"type": "image", "image": key}]


def test_a_schedule_and_a_checkpoint_keep_images(live, images, tmp_path) -> None:
    """Another process has the patches of both from their files, and plays the replies without an environment. Would
    not catch a file of another run under the same name: digests do.
    """
    images.turns.record_in(tmp_path / FOLDER, None)
    known = episode()
    replies = [(7, played(live, known, png(28, 56), png(28, 28, shade=9))), (7, played(live, known, png(28, 28)))]
    digests = [piece.digest for piece in known.images]
    expected = images.patches(digests)

    def other() -> PromptImages:
        return PromptImages("images", images._forms, PlaceholderIds(IMAGE, (IMAGE,)), None)

    replayed, resumed = other(), other()
    replayed.turns.record_in(tmp_path / "second", tmp_path / FOLDER)
    (tmp_path / "second").mkdir()
    for piece in known.images:  # a kill leaves such files
        (tmp_path / "second" / f"{piece.digest}.unfinished").write_bytes(b"\x89PNG")
    again, recorded = episode(), RecordedEpisodes(live.limits, replies)
    for _ in replies:
        again.extend(SAID, 0, has_turns=True)
        recorded.submit(7, again)
        ((_, reply),) = recorded.take_of({7}, waits=True)
        replayed.turns.record(reply.images)
        again.take(reply, live.limits)
    assert again.token_ids == known.token_ids and again.images == known.images
    tensors = images_as_tensors({5: known, 6: episode()}, images.turns)
    resumed.turns.add(encoded_of_tensors(tensors))
    assert pieces_of_tensors(tensors) == {5: known.images} and pieces_of_tensors({}) == {}
    for one in (replayed, resumed):
        for (grid, patches), (own, values) in zip(expected, one.patches(digests), strict=True):
            assert grid == own and torch.equal(patches, values)
        one.close()
    assert len(list((tmp_path / "second").iterdir())) == 3


def test_dropped_images_are_the_oldest_that_no_episode_shows(images) -> None:
    """Would not catch an image whose features were forgotten, which is read again."""
    contents = [png(28, 28, shade=shade) for shade in range(4)]
    images.turns._most_bytes = 2 * max(map(len, contents))
    coded = [{key_of(content): base64.b64encode(content).decode()} for content in contents]
    for one in coded:
        images.keep(one)
    first = images.turns.known(key_of(contents[0]))[0]
    images.turns.forget({first})
    assert list(images.turns._sizes) == [key_of(contents[0]), key_of(contents[3])]
    assert images.turns.encoded(first) == contents[0]
    images.keep(coded[1])
    assert images.turns.known(key_of(contents[1]))[0] != first


def test_equal_tokens_with_other_images_stay_apart(live) -> None:
    """Two episodes of equal tokens whose last turns show other images: keys of the engine's prefix cache and of tries
    differ from the first placeholder on. Would not catch a trie that leaves its keys out.
    """
    pair = [episode(), episode()]
    for shade, known in enumerate(pair):
        played(live, known, png(28, 28, shade=9))
        played(live, known, png(56, 56, shade=shade))
    one, other = pair
    assert one.token_ids == other.token_ids and one.images[0] == other.images[0]
    rows = rows_of(pair, with_versions=False, has_turns=True)
    numbers = torch.tensor([piece.numbers for known in pair for piece in known.images])
    rows.add(Batch(image_pieces=ragged_from_lengths(numbers, torch.tensor([2, 2]))))
    keys = image_bytes(rows).view(2, -1, 16)
    differs = (keys[0] != keys[1]).any(-1).nonzero().flatten()
    assert differs.tolist() == list(range(one.images[1].first, one.images[1].stop))


TOOLS = """
from PIL import Image

from megatron_rl.agents.tools import tool

IMAGE = Image.new("RGB", (28, 28), (9, 9, 9))


@tool
def zoom(place: int):
    '''Zoom.

    Args:
        place: where
    '''
    return IMAGE if place else [{"type": "text", "text": "here"}, {"type": "image", "image": IMAGE}]


class Response:
    def __init__(self, text, image):
        self.text, self.image = text, image


class Zoom:
    def __init__(self, config, schema): ...

    def create(self, instance, images=(), **more):
        self.images = images
        return instance

    def execute(self, instance, arguments):
        return Response(f"{len(self.images)} images", [IMAGE]), 0.5, {}

    def release(self, instance): ...
"""
CLASSES = """
tools:
  - class_name: image_tools_for_tests.Zoom
    config: {}
    tool_schema: {type: function, function: {name: zoom, parameters: {properties: {place: {type: integer}}}}}
"""


@pytest.mark.parametrize("is_yaml", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_tools_show_images(tmp_path, monkeypatch, is_yaml: bool, reads: bool) -> None:
    """Functions and verl's classes, which are given those of the prompt. In a run of text both
    are texts. Would not catch a tool that shows the image of another episode.
    """
    (tmp_path / "image_tools_for_tests.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = "tools.yaml" if is_yaml else "image_tools_for_tests.py"
    source = ToolSource(str(tmp_path / file), "key", is_yaml, 4, 9.0, False, TextLimit(999), reads)
    row = {"images": [png(28, 28)]} if reads else {}
    calls = tuple(ToolCall("zoom", {"place": place}) for place in range(2))
    with EnvironmentsHere(source.host()) as here:
        here.play(0, TurnJob(0, row, (), Turn("", calls)))
        ((_, answer),) = here.take(waits=True)
    assert isinstance(answer, WithImages) is reads
    content = [message["content"] for message in (answer.answer if reads else answer).messages]
    shown = {"type": "image", "image": key_of(png(28, 28, shade=9))}
    if is_yaml:
        text = f"{len(row)} images"
        assert content == [[shown, {"type": "text", "text": text}] if reads else text] * 2
    elif reads:
        assert content == [[{"type": "text", "text": "here"}, shown], [shown]] and len(answer.images) == 1
    else:
        assert all(isinstance(text, str) for text in content)
