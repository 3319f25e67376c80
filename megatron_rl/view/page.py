"""The page: one HTML file with its style, its program and its data, that needs no network."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from megatron_rl.observe.summary import finite_or_null

PARTS = {
    "STYLE": "page.css",
    "CONTRAST": "contrast.js",
    "CHARTS": "charts.js",
    "SAMPLES": "samples.js",
    "PROGRAM": "page.js",
}
"""Mark in page.html -> file that takes its place."""
MARK = re.compile(r"@@(\w+)@@")


def page(data: dict[str, Any], samples: list[dict[str, Any]], title: str) -> str:
    """Return the HTML of a page. Nothing of data, samples or title is read as HTML."""
    here = files("megatron_rl.view")
    content = {mark: (here / name).read_text() for mark, name in PARTS.items()}
    content |= {"TITLE": escaped(title), "DATA": as_script(data), "EPISODES": as_script(samples)}
    return MARK.sub(lambda mark: content[mark[1]], (here / "page.html").read_text())


def as_script(content: Any) -> str:
    """Return JSON that a script element may hold: it has no "<", so nothing in it ends the element."""
    return json.dumps(finite_or_null(content), allow_nan=False, separators=(",", ":"), default=str).replace(
        "<", "\\u003c"
    )


def escaped(text: str) -> str:
    """Return a text as HTML shows it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
