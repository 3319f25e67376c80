"""Colours of the page: its program computes contrast as the pictures do, and every phase can be seen on a dark page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from megatron_rl.observe.picture_style import FURTHER, OCCASIONAL, READABLE, STACKED, contrast, text_color

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node: apt-get install nodejs")
CARDS = re.findall(r"--card: (#\w{6})", files("megatron_rl.view").joinpath("page.css").read_text())
COLORS = [*STACKED.values(), *OCCASIONAL.values(), *FURTHER]


def computed() -> list[list[dict[str, str]]]:
    """For each card, light and dark, and colour: the colour that is drawn, and that of text on it."""
    script = files("megatron_rl.view").joinpath("contrast.js").read_text()
    wanted = f"{json.dumps(CARDS)}.map((card) => {json.dumps(COLORS)}.map((color) => seenOn(color, card)))"
    shown = f"{wanted}.map((drawn) => drawn.map((fill) => ({{ fill, text: textOn(fill) }})))"
    command = [str(NODE), "--eval", f"{script}\nconsole.log(JSON.stringify({shown}))"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_colours_are_seen_on_both_pages() -> None:
    """On the light page as in pictures, on the dark one with a contrast of 4.5. Would not catch another background."""
    light, dark = computed()
    assert [one["fill"] for one in light] == COLORS
    assert not [one for one in dark if contrast(one["fill"], CARDS[1]) < READABLE]
    assert all(one["text"] == text_color(one["fill"]) for one in (*light, *dark))
