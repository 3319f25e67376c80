"""What a person sees around the run."""

import io
import json
from types import SimpleNamespace

from rich.console import Console

from megatron_rl.observe.progress import PhaseColumn, RunProgress
from megatron_rl.observe.summary import before_after_table, layout_table, write_summary


def drive(console):
    with RunProgress(total_steps=4, console=console) as progress:
        progress.phase("gen")
        progress.step(2, reward=0.5, accuracy=0.25, step_seconds=1.5)
        console.print("a line of the logger")


def test_progress_is_silent_off_a_terminal():
    """Only the logger's line appears. Would not catch a terminal that claims not to be one."""
    output = io.StringIO()
    drive(Console(file=output, force_terminal=False))
    assert output.getvalue() == "a line of the logger\n"


def test_progress_shows_step_facts_and_phase_on_a_terminal():
    """Would not catch flicker."""
    output = io.StringIO()
    drive(Console(file=output, force_terminal=True, width=120, color_system=None))
    for part in ("step", "2/4", "reward 0.500  accuracy 0.250  1.5 s/step", "gen"):
        assert part in output.getvalue()


def test_a_long_wait_shows_its_seconds():
    """By a clock of the test's: before, in and between phases, and after the last step. Would not catch a bar that
    stands still.
    """
    now, shown = [0.0], []
    column = PhaseColumn(lambda: now[0])
    for seconds, phase, completed in ((1.9, "", 0), (9.0, "", 0), (1.0, "init", 0), (61.2, "", 0), (3.0, "", 4)):
        now[0] += seconds
        shown.append(column.render(SimpleNamespace(fields={"phase": phase}, completed=completed, total=4)).plain)
        if seconds == 9.0:
            column.begin()
    assert shown == ["starting", "starting 11 s", "init", "", "ending 65 s"]


def test_tables_show_every_cell_and_the_change():
    """Would not catch an ugly layout."""
    output = io.StringIO()
    console = Console(file=output, width=100)
    console.print(before_after_table([("accuracy", 0.347, 0.98)]))
    console.print(layout_table([("samples per rank", 120, "60 * 12 / 6")]))
    for cell in ("accuracy", "0.347", "0.980", "+0.633", "samples per rank", "120", "60 * 12 / 6"):
        assert cell in output.getvalue()


def test_summary_is_sorted_valid_json(tmp_path):
    """Nested NaN becomes null. Would not catch values that are not JSON at all: those raise TypeError."""
    path = tmp_path / "new" / "summary.json"
    write_summary(path, {"b": {"x": float("nan"), "y": [1.0, float("-inf")]}, "a": 1})
    assert json.loads(path.read_text()) == {"a": 1, "b": {"x": None, "y": [1.0, None]}}
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
