"""A training loop of one's own: GRPO that updates on the best and the worst response to each prompt.

    python scripts/demo_loop.py --config configs/grpo_cpu.yaml [--local] [KEY=VALUE ...]

`megatron_rl/train.py` with one line more: all responses are compared, and two of each group are trained. Of 8 responses
to a prompt, an update then computes a quarter. docs/train/own_loop.md explains it line by line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.cli import print_error
from megatron_rl.cli.tasks import imports_of, made_ready, startable
from megatron_rl.config.tasks import PPO
from megatron_rl.errors import MegatronRLError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.controller.repairs import Repairs
    from megatron_rl.controller.run import Run


def train_once(repairs: Repairs, local: bool) -> dict[str, Any]:
    """Train until the last step, from the newest checkpoint if there is one; returns the summary."""
    from megatron_rl.controller.report import finish_run
    from megatron_rl.controller.run import open_run

    with open_run(repairs, local) as run:
        run.validation.before_training(run.life.is_resumed)
        for step in run.life.steps():
            run.logger.log(take_step(run, step), step)
        return finish_run(run)


def take_step(run: Run, step: int) -> dict[str, float]:
    """Take one step of the loop; returns its metrics."""
    from megatron_rl.scoring.batch_scorers import score
    from megatron_rl.train import update

    batch = run.sampler.next(step)
    score(run.scorers, batch)
    metrics = run.algorithm.add_advantages(batch.rows, step)
    kept = best_and_worst(batch.rows["scores"], batch.rows["groups"])
    metrics |= update(run, batch.rows[kept], step) | {"loop/kept_rows": len(kept)}
    run.refresh_reference(step)
    run.sampler.load_weights(step)
    metrics |= run.describe(batch)
    return metrics | run.validation.after(step)


def best_and_worst(scores: Tensor, groups: Tensor) -> Tensor:
    """Return int64 row numbers, in order: the best and the worst response of each group, the first and last of equals.

    A group of equal scores has no gradient and is left out. If all are such, every row is kept: a step has an update.
    scores: float [B]. groups: int64 [B], equal for the responses to one prompt.
    """
    import torch

    by_score = scores.argsort(stable=True)
    rows = by_score[groups[by_score].argsort(stable=True)]  # group after group, from low to high within each
    sizes = groups.unique(return_counts=True)[1]
    last = sizes.cumsum(0) - 1
    worst, best = rows[last - sizes + 1], rows[last]
    differ = scores[best] > scores[worst]
    if not differ.any():
        return torch.arange(len(scores))
    return torch.cat((worst[differ], best[differ])).sort().values


def main() -> None:
    """Read the configuration as `megatron-rl train` does, and train; exit codes are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--local", action="store_true", help="one rank, in this process")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    try:
        config = made_ready(startable(given.config, given.overrides, PPO, collapse=given.local), given.local)
        with imports_of(config):
            from megatron_rl.controller.repairs import with_repairs
        with_repairs(config, given.local, lambda repairs: train_once(repairs, given.local))
    except MegatronRLError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
