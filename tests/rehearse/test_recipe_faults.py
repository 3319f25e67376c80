"""Faults planted in a copy of the package, and what `megatron-rl rehearse` says of a recipe that has them.

Faults of one row are planted together where none of them ends a rank.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
RECIPE = "configs/recipes/qwen2.5_7b_grpo.yaml"
KNOWN = "configs/known/qwen2.5_7b_grpo.txt"
MEGATRON = "actor_rollout_ref.actor.megatron"
SMALL = (
    *("--layers", "1", "--ranks", "all", "trainer.n_gpus_per_node=2", "data.train_batch_size=8"),
    *("data.max_response_length=512", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
)
"""Two ranks, and a tenth of the recipe's passes."""
STAGES = (
    f"{MEGATRON}.tensor_model_parallel_size=1",
    f"{MEGATRON}.pipeline_model_parallel_size=2",
    f"{MEGATRON}.sequence_parallel=false",
)


class Planted(NamedTuple):
    """A fault. file: of the package. old: once in it. new: what takes its place. words: all are said of it."""

    file: str
    old: str
    new: str
    words: tuple[str, ...]


COMBINE = "    dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)\n"
SECOND = "    dist.all_reduce(total, group=tp_group)\n"
COPY = "    there = buffer.to(device, non_blocking=True)\n"
RUN = "        made_progress()\n        block = one.block\n"
STARTED = "under_way.append((self.transport.start(step.send, step.receive), step))\n"
RECEIVED = "        received, members = self.transport.received_from - before, self.plan.members\n"
ROWS = {
    "together": (
        (),
        (
            Planted(
                "model/log_probs.py",
                COMBINE,
                COMBINE.replace("dist.ReduceOp.MAX", "(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank()]"),
                ("one reduces by SUM, the other by MAX",),
            ),
            Planted(
                "model/log_probs.py",
                SECOND,
                f"{SECOND}    dist.all_reduce(total.new_zeros(2, 3).t(), group=tp_group)\n"
                "    dist.all_reduce(total.new_zeros(7), group=tp_group, async_op=True)\n",
                ("is not contiguous, which NCCL refuses", "allreduce of 7 float32", "is never waited for"),
            ),
            Planted(
                "roles/training.py",
                "dist.all_reduce(counts, group=self.groups.row_group)",
                "dist.all_reduce(counts, group=self.groups.tp_group)",
                ("allreduce over TENSOR_MODEL_PARALLEL_GROUP at roles/training.py",),
            ),
            Planted(
                "device.py",
                COPY,
                f"    with torch.cuda.stream(torch.cuda.Stream()):\n    {COPY}",
                ("on side stream", "nothing orders them"),
            ),
            Planted(
                "roles/pipeline.py",
                RUN,
                f"{RUN}        int(block.input_ids.sum())\n        torch.ones(8).to(self.device)\n",
                ("aten._local_scalar_dense.default at roles/pipeline.py", "copy to device at roles/pipeline.py"),
            ),
        ),
    ),
    "scratch of the exchange": (
        STAGES,
        (
            Planted(
                "hybrid_engine/exchange.py",
                STARTED,
                f"{STARTED}                self.scratch.release()\n",
                (
                    "the write at hybrid_engine/exchange.py",
                    "memory released at",
                    "on collectives of a group still runs",
                ),
            ),
        ),
    ),
    "gathered weights": (
        STAGES,
        (
            Planted(
                "hybrid_engine/allgather_pp.py",
                RECEIVED,
                f"{RECEIVED}        self.foreign.release()\n",
                ("reshard: the read at", "released at hybrid_engine/stable_memory.py"),
            ),
        ),
    ),
    "left out": (
        (),
        (
            Planted(
                "model/log_probs.py",
                SECOND,
                f"    if dist.get_rank() == 0:\n    {SECOND}",
                ("rank 0's allreduce", "at model/log_probs.py"),
            ),
        ),
    ),
}
"""Overrides and faults."""

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.weekly, pytest.mark.timeout(1800)]


def with_faults(folder: Path, faults: tuple[Planted, ...]) -> None:
    """Copy the package, its patches and the recipes, and plant the faults."""
    for name in ("megatron_rl", "third_party_patches", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for fault in faults:
        file = folder / "megatron_rl" / fault.file
        text = file.read_text()
        assert text.count(fault.old) == 1, fault
        file.write_text(text.replace(fault.old, fault.new))


@pytest.mark.parametrize("row", ROWS)
def test_faults_of_a_recipe_are_named(tmp_path, row):
    """Code 1, and each fault in words. Would not catch a fault that shows itself in numbers alone."""
    overrides, faults = ROWS[row]
    with_faults(tmp_path, faults)
    command = [sys.executable, "-m", "megatron_rl", "rehearse", "--config", RECIPE, "--out", str(tmp_path / "out")]
    known = () if overrides else ("--known", KNOWN)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(
        [*command, *known, *SMALL, *overrides],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = answer.stdout + answer.stderr
    assert answer.returncode == 1, said
    for fault in faults:
        assert all(word in said for word in fault.words), f"{fault.words} are not said:\n{said}"
