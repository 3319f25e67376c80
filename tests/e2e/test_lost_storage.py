"""A run's folder that vanishes is made again; a disk that takes no more ends the run with one sentence and code 7."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from short_runs import LOCAL, SHORT, TP2, WITHOUT_RAY, reached, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("layout", "rank"),
    [(LOCAL, 0), pytest.param((*TP2, WITHOUT_RAY), 1, marks=pytest.mark.exhaustive)],
    ids=["local", "TP2"],
)
def test_a_folder_vanishes_and_then_the_disk_is_full(command_line, layout, rank: int, tmp_path: Path) -> None:
    """Deleted after step 1; from step 3 on the last rank can write only small files, and the save after step 4 fails.

    The limit on the size of files stands for a full disk, which takes root to make. It would not catch what a file
    system does to other files when it is full.
    """
    loss = tmp_path / "loss.py"
    loss.write_text(
        "import os, pathlib, resource\n"
        "from megatron_rl.losses.policy import vanilla_loss\n"
        "def limited(tokens, config):\n"
        f"    if os.environ['RANK'] == '{rank}' and pathlib.Path({str(tmp_path / '0/run/global_step_2')!r}).exists():\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        "    return vanilla_loss(tokens, config)\n"
    )
    key = "actor_rollout_ref.actor.policy_loss"
    settings = (f"{key}.loss_mode=limited", f"{key}.custom.path={loss}", "trainer.save_freq=2")
    run = command_line(*SHORT, *layout, *settings)
    run.wait_for(reached(run, 1))
    shutil.rmtree(run.run)
    assert run.wait() == 7, run.text()
    said = run.text().splitlines()
    assert f"{run.run} was deleted or emptied during the run; it was made again, without the" in run.text()
    (error,) = (line for line in said if line.startswith("StorageError"))
    assert error.startswith(f"StorageError: global_step_4 could not be written to {run.run}: rank ")
    reasons = (f": rank {rank}: File too large", f": rank {rank}: a file could not", "Errno 27")
    assert any(reason in error for reason in reasons)
    assert (
        " bytes are free there; the last complete checkpoint is global_step_2; the same command resumes from it"
        in error
    )
    assert "Traceback" not in run.text()
    assert [json.loads(line)["step"] for line in run.metrics().splitlines()] == [1, 2, 3, 4]
    assert steps_saved(run) == [2] and not list(run.run.glob("*.unfinished"))
    assert run.left_over() == []
