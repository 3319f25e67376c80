"""Metrics on their way to console, file and TensorBoard."""

import io
import json
import math
import shutil

import pytest
from full_disk import full_disk
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.observe.loggers import MetricLogger


def test_jsonl_is_valid_and_on_disk_at_once(tmp_path):
    """NaN and infinity become null; read before closing. Would not catch metrics nested in lists."""
    with MetricLogger(["jsonl"], tmp_path / "run") as logger:
        logger.log({"a": 1.5, "b": float("nan"), "c": float("inf")}, step=0)
        logger.log({"a": 2}, step=1)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "a": 1.5, "b": None, "c": None}, {"step": 1, "a": 2.0}]


def test_a_new_run_starts_the_file_anew(tmp_path):
    """Would not catch two runs that write at the same time."""
    for value in (1.0, 2.0):
        with MetricLogger(["jsonl"], tmp_path) as logger:
            logger.log({"a": value}, step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 2.0}\n'


def test_a_resumed_run_repeats_the_later_steps(tmp_path):
    """Steps 1 to 3 and half of a line; resumed after 2. Would not catch a file of another run in the same folder."""
    with MetricLogger(["jsonl"], tmp_path) as logger:
        for step in (0, 1, 2, 3):
            logger.log({"a": 1.0}, step)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 4, "a\xc3')
    with MetricLogger(["jsonl"], tmp_path, resumed_step=2) as logger:
        logger.log({"a": 2.0}, 3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"step": step, "a": 1.0} for step in (0, 1, 2)] + [{"step": 3, "a": 2.0}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_a_run_makes_up_for_joins_its_steps_line(tmp_path):
    """The validation of the step that a run goes on from, beside a null, and the next step after it. Would not catch a
    kill in between.
    """
    with MetricLogger(["jsonl"], tmp_path) as logger:
        logger.log({"a": 1.0}, 1)
        logger.log({"a": 2.0, "b": math.nan}, 2)
    with MetricLogger(["jsonl"], tmp_path, resumed_step=2) as logger:
        logger.log({"val": 0.5}, 2)
        logger.log({"a": 3.0}, 3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": None, "val": 0.5}, {"step": 3, "a": 3.0}]


@pytest.mark.parametrize("content", ["", "{}", '[1]\n3\n"x"\n', '{"step": 9, "a": 1.0}'])
def test_a_resumed_run_needs_no_lines_before_it(tmp_path, content):
    """Nothing to keep, and no file at all. Would not catch a file that may not be written."""
    (tmp_path / "metrics.jsonl").write_text(content)
    for folder in (tmp_path, tmp_path / "new"):
        with MetricLogger(["jsonl"], folder, resumed_step=4) as logger:
            logger.log({"a": 2.0}, 5)
        assert (folder / "metrics.jsonl").read_text() == '{"step": 5, "a": 2.0}\n'


def test_lines_that_are_no_steps_are_dropped(tmp_path):
    """A step that is a word, and lists in lists. Would not catch a number of the wrong step."""
    (tmp_path / "metrics.jsonl").write_text('{"step": "1"}\n{"step": 1, "a": 2.0}\n' + "[" * 100_000 + "\n")
    with MetricLogger(["jsonl"], tmp_path, resumed_step=1):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 2.0}\n'


def test_a_last_line_without_its_end_is_whole_again(tmp_path):
    """A complete object whose newline was lost. Would not catch two objects on one line."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}')
    with MetricLogger(["jsonl"], tmp_path, resumed_step=1) as logger:
        logger.log({"a": 2.0}, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n'


def test_console_prints_one_plain_line_per_step(tmp_path):
    """No control characters and no wrapping off a terminal. Would not catch an unlucky choice of metrics."""
    output = io.StringIO()
    with MetricLogger(["console"], tmp_path, Console(file=output, width=20)) as logger:
        logger.log({"critic/score/mean": 0.61, "timing_s/step": 1.25, "actor/lr": 1.0}, step=7)
        logger.log({"val-core/demo/acc/mean@1": 0.3471}, step=8)
    assert output.getvalue() == "step 7  reward 0.610  1.2 s\nstep 8  held-out acc 0.347\n"


def test_tensorboard_scalars_read_back(tmp_path):
    """Would not catch a slow flush while the run goes on."""
    with MetricLogger(["tensorboard"], tmp_path) as logger:
        logger.log({"actor/lr": 0.5}, step=0)
        logger.log({"actor/lr": 0.25}, step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(0, 0.5), (3, 0.25)]


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path):
    """Steps 1 to 3, resumed after 2. Would not catch a reader that shows hidden events."""
    for resumed_step, steps, value in ((None, (1, 2, 3), 0.5), (2, (3, 4), 0.25)):
        with MetricLogger(["tensorboard"], tmp_path, resumed_step=resumed_step) as logger:
            for step in steps:
                logger.log({"actor/lr": value}, step)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("actor/lr")]
    assert found == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]


def test_a_full_disk_costs_no_line(tmp_path):
    """The lines of two steps wait for the third; said twice in all. Would not catch a disk that is full at the end."""
    output = io.StringIO()
    with MetricLogger(["jsonl", "console"], tmp_path, Console(file=output, width=20)) as logger:
        logger.log({"a": 1.0}, 1)
        with full_disk(30):
            logger.log({"a": 1.0}, 2)
            logger.log({"a": 1.0}, 3)
            assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n'
        logger.log({"a": 1.0}, 4)
        logger.log({"a": 1.0}, 5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "a": 1.0} for step in (1, 2, 3, 4, 5)]
    said = [line for line in output.getvalue().splitlines() if not line.startswith("step")]
    assert said == [
        "metrics.jsonl cannot be written: [Errno 27] File too large; training continues, and lines wait until it can",
        "metrics.jsonl is written again, with all lines from step 2 on",
    ]


def test_lines_that_are_lost_at_the_end_are_named(tmp_path):
    """Would not catch a run that is killed while lines wait."""
    output = io.StringIO()
    logger = MetricLogger(["jsonl"], tmp_path, Console(file=output, width=20))
    with full_disk(0):
        logger.log({"a": 1.0}, 7)
        logger.log({"a": 1.0}, 8)
        logger.close()
    assert output.getvalue().endswith("metrics.jsonl is missing the lines from step 7 on: [Errno 27] File too large\n")


def test_tensorboard_is_dropped_when_it_cannot_be_written(tmp_path, capfd):
    """Said once, without a traceback, and what was written stays. Would not catch a disk that is slow."""
    output = io.StringIO()
    with MetricLogger(["tensorboard"], tmp_path, Console(file=output, width=20)) as logger:
        logger.log({"a": 1.0}, 1)
        with full_disk(0):
            logger.log({"a": 2.0}, 2)
        logger.log({"a": 3.0}, 3)
    assert output.getvalue() == "TensorBoard gets no more events of this run: [Errno 27] File too large\n"
    assert capfd.readouterr() == ("", "")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0)]


def test_files_that_are_deleted_come_back_whole(tmp_path):
    """The whole folder, then one file. Would not catch a folder that is deleted after the last step."""
    with MetricLogger(["jsonl", "tensorboard"], tmp_path / "run") as logger:
        logger.log({"a": 1.0}, 1)
        shutil.rmtree(tmp_path / "run")
        logger.log({"a": 2.0}, 2)
        (tmp_path / "run/metrics.jsonl").unlink()
        logger.log({"a": 3.0}, 3)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0)]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["a"]) for line in lines] == expected
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == expected


def test_a_file_that_was_edited_is_gone_on_with(tmp_path):
    """Editors put another file in its place. Would not catch an editor that has it open all the time."""
    with MetricLogger(["jsonl"], tmp_path) as logger:
        logger.log({"a": 1.0}, 1)
        (tmp_path / "edited").write_text('{"step": 1, "a": 9.0}\n')
        (tmp_path / "edited").replace(tmp_path / "metrics.jsonl")
        logger.log({"a": 2.0}, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 9.0}\n{"step": 2, "a": 2.0}\n'


def test_files_come_before_what_is_printed(tmp_path):
    """A console that ends the program. Would not catch a console that hangs."""

    class Ending(io.StringIO):
        def write(self, text: str) -> int:
            raise SystemExit

    with pytest.raises(SystemExit), MetricLogger(["console", "jsonl"], tmp_path, Console(file=Ending())) as logger:
        logger.log({"a": 1.0}, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n'


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    """A data source is the user's. Would not catch a control character."""
    output = io.StringIO()
    with MetricLogger(["console"], tmp_path, Console(file=output, width=20)) as logger:
        logger.log({"val-core/[/a] [bold]b/acc/mean@1": 0.5, "val-core/c/acc/mean@1": 1.0}, step=1)
    assert output.getvalue() == "step 1  [/a] [bold]b/acc/mean@1 0.500  c/acc/mean@1 1.000\n"
