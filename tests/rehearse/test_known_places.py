"""Host waits and groups next to an accepted list: reports by hand, a file, and the command's options; no processes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import ConfigError
from megatron_rl.rehearse import known_places
from megatron_rl.rehearse.known_places import found_places, function_of, new_places, read_places, text_of


def line_of(file, text):
    lines = (known_places.PACKAGE / file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def report(waits, purpose="DATA_PARALLEL_GROUP"):
    call = {
        "phase": "update",
        "name": "allreduce",
        "purpose": purpose,
        "line": line_of("roles/training.py", "counts, "),
    }
    return {"waits": {"update": waits}, "num_blocks": {"update": 4}, "calls": [call]}


READ = line_of("roles/training.py", "counts.tolist()")


def test_planted_places_are_named_with_their_lines(tmp_path):
    """A wait elsewhere, one in each pass where one came in a step, and a sum over another group. Would not catch a wait
    in the place of one that went.
    """
    file = tmp_path / "places.txt"
    file.write_text(text_of({}, found_places([report({f"copy to host at {READ}": 1})])))
    assert file.read_text() == (
        "0 update: allreduce over DATA_PARALLEL_GROUP at roles/training.py totals\n"
        "0 update: copy to host at roles/training.py totals\n"
    )
    known = read_places(file)
    assert new_places(found_places([report({f"copy to host at {READ}": 3})]), known, file) == []
    other = report({f"copy to host at {READ}": 4, "copy to device at autograd": 1}, "TENSOR_MODEL_PARALLEL_GROUP")
    said = " ".join(new_places(found_places([other]), known, file))
    assert f"copy to host at {READ} comes 1 times for each micro-batch, and 0 times in" in said
    assert f"update: copy to device at autograd is not in {file}" in said
    assert "allreduce over TENSOR_MODEL_PARALLEL_GROUP at roles/training.py:" in said
    file.write_text(text_of(known, found_places([other])))
    assert new_places(found_places([other]), read_places(file), file) == [] and len(read_places(file)) == 4


def test_places_have_no_numbers_of_lines():
    """A method, a line outside, another package. Would not catch two functions of one name in a file."""
    assert function_of(READ) == "roles/training.py totals"
    assert function_of("roles/training.py:1") == "roles/training.py"
    assert function_of("megatron/tensor_parallel/layers.py:7") == "megatron"


@pytest.mark.parametrize("content", ["copy to host\n", "x update: copy\n", "\xff\n"])
def test_a_list_that_is_none_is_refused(tmp_path, content):
    """Would not catch a place that no code has."""
    (tmp_path / "places.txt").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="line 1: .* must be NUMBER PHASE: PLACE"):
        read_places(tmp_path / "places.txt")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--known", "nowhere.txt"], "--known nowhere.txt is no file; write it with --accept"),
        (["--accept"], "--accept adds to the file of --known, which is missing"),
        (["--known", "nowhere/places.txt", "--accept"], "must be in a folder that exists; try: mkdir -p nowhere"),
    ],
)
def test_the_command_refuses_before_it_rehearses(options, why):
    """Would not catch a list that is written elsewhere."""
    answer = CliRunner().invoke(app, ["rehearse", "--config", "configs/llama3_70b_ppo.yaml", *options])
    assert answer.exit_code != 0 and why in str(answer.exception)
