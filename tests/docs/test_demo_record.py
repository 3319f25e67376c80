"""Pages say of the demo what docs/demo_run.json has recorded."""

from __future__ import annotations

import json
import re

import demo_record
import pytest
from demo_record import ACCURACY, PAGES, RECORD

CONTENT = {
    "command": "make demo",
    "seed": 7,
    "cores": 2,
    "install_seconds": 100.0,
    "install_cpu_seconds": 80.0,
    "run_seconds": 90.0,
    "run_cpu_seconds": 120.0,
    "metrics": [{"step": 0, ACCURACY: 0.25}, {"step": 1, "timing_s/step": 2.0}, {"step": 2, ACCURACY: 0.5}],
}
CHANGE = re.compile(r"(0\.\d{3})\s*(?:to|->|\N{RIGHTWARDS ARROW})\s*(0\.\d{3})")
OF_THE_DEMO = re.compile(r"make demo(?![-\w])|\bdemo_cpu\.yaml")


def test_a_page_takes_the_numbers_of_the_record() -> None:
    """By hand. Would not catch a mark that no page has."""
    script = "by scripts/demo_record.py -->"
    marks = [f"<!-- {edge} of demo in a sentence, {script}" for edge in ("begin", "end")]
    row = "| `demo_cpu.yaml` | PPO | TP2 | {} |"
    page = "\n".join((marks[0], "old", marks[1], row.format("0.1 | 0.2 | 9.9"), "| `grpo_cpu.yaml` | 0.1 |"))
    assert demo_record.current(page, CONTENT).split("\n") == [
        marks[0],
        "Held-out accuracy goes from 0.250 to 0.500 in 2 steps.",
        marks[1],
        row.format("0.250 | 0.500 | 1.5"),
        "| `grpo_cpu.yaml` | 0.1 |",
    ]
    table = demo_record.blocks(CONTENT)["the demo"].split("\n")
    assert table[2:] == [
        "| held-out accuracy before training | 0.250 |",
        "| held-out accuracy after step 2 | 0.500 |",
        "| installation, once | 100 s, 80 CPU seconds |",
        "| run, start to exported model | 90 s, 120 CPU seconds |",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_current(page) -> None:
    """Marks and rows, and every sentence with `make demo` that has accuracies before and after.

    Would not catch numbers of the demo in a sentence that does not name it.
    """
    text, content = page.read_text(), json.loads(RECORD.read_text())
    assert demo_record.current(text, content) == text, "run python scripts/demo_record.py"
    measured = [f"{accuracy:.3f}" for accuracy in demo_record.accuracies(content).values()]
    changes = {
        pair
        for paragraph in re.split(r"\n\n|(?<=[.!])\s", text)
        if OF_THE_DEMO.search(paragraph)
        for pair in CHANGE.findall(paragraph)
    }
    assert changes <= {(measured[0], measured[-1])}


def test_a_page_shows_them() -> None:
    """Would not catch a page that nobody finds."""
    assert any("<!-- begin of the demo, by scripts/demo_record.py -->" in page.read_text() for page in PAGES)
