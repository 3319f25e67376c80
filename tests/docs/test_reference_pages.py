"""The pages of docs/reference are those that the package's tables make."""

from __future__ import annotations

import json
import re

import reference_pages
from reference_pages import stale_pages, table_of

from megatron_rl.observe.metric_names import GROUPS, metric_of


def test_made_pages_are_current(tmp_path):
    """Would not catch a table of the package that lists too little; nothing in an empty folder is current."""
    assert not stale_pages()
    assert reference_pages.readme(reference_pages.README.read_text()) == reference_pages.README.read_text()
    assert reference_pages.audit(reference_pages.AUDIT.read_text()) == reference_pages.AUDIT.read_text()
    assert reference_pages.data(reference_pages.DATA.read_text()) == reference_pages.DATA.read_text()
    assert stale_pages(tmp_path) == [*reference_pages.PAGES]


def test_a_bar_within_a_cell_is_escaped():
    """By hand."""
    assert table_of(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |"


def test_recorded_metrics_are_in_the_table():
    """Of the kept runs and the golden file: every name has a row. Would not catch a metric that none of them has."""
    repository = reference_pages.FOLDER.parents[1]
    names = set(json.loads((repository / "configs/nightly_golden.json").read_text())["metrics"])
    for file in (repository / "tests/fixtures/kept_runs").glob("*/metrics.jsonl"):
        names |= {name for line in file.read_text().splitlines() for name in json.loads(line)}
    assert not {name for name in names - {"step"} if metric_of(name) is None}


def test_rows_of_metrics():
    """By hand; and no name of the table is described by an earlier row."""
    expected = {
        "critic/score/mean": "score",
        "actor/grad_norm": "norm",
        "timing_s/step": "s",
        "timing_s/update_actor": "s",
        "staleness/2/share": "share",
        "val-core/demo/addition/acc/mean@1": "score",
        "training/rollout_logprob_diff_p99_without_replay": "nats",
    }
    assert {name: metric_of(name).unit for name in expected} == expected
    assert metric_of("strict/rows") is None and metric_of("critic/score/median") is None
    rows = [row for group in GROUPS.values() for row in group]
    for row in rows:
        name = re.sub(r"\{([^}|]*)[^}]*\}", lambda found: found[1].rstrip(".") or "x", row.name)
        assert metric_of(name) is row, name
