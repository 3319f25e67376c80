"""Steps of this package in one process, each when a line comes in. `step.py` and `sft_step.py` start it.

    python scripts/bench/step_ours.py CONFIG local|ray|ranks|parts [DOTTED=OVERRIDE ...]

Builds what `megatron-rl train` builds, or `megatron-rl sft` where `trainer.stage` says so, with `--local` or through
Ray, and takes the steps of its loop. A line of JSON says that it is ready, and one for each step what it came to.
parts: local, with the seconds of `step_parts.py`. ranks: as ray, with the launcher that the configuration names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import step_parts

from megatron_rl.config.load import read_run
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import for_task
from megatron_rl.config.tasks import SFT
from megatron_rl.controller.repairs import repairs_of
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.roles.environment import worker_environment


@contextmanager
def opened(config: RunConfig, local: bool) -> Iterator[Callable[[], dict[str, float]]]:
    """What takes the next step of a run and returns its metrics, with its tokens under `tokens`."""
    from megatron_rl.controller.run import open_run
    from megatron_rl.tasks import sft
    from megatron_rl.tasks.task_run import open_task
    from megatron_rl.train import take_step

    run: Any

    def step_of_sft() -> dict[str, float]:
        step = next(steps)
        metrics = sft.take_step(run)
        run.logger.log(metrics, step)
        return metrics | {"tokens": metrics["perf/total_num_tokens"]}

    def step_of_grpo() -> dict[str, float]:
        step = next(steps)
        metrics = take_step(run, step)
        run.logger.log(metrics, step)
        samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        return metrics | {"tokens": metrics["response_length/mean"] * samples}

    is_sft = config.trainer.stage == SFT
    with repairs_of(config, local) as repairs, (open_task if is_sft else open_run)(repairs, local=local) as run:
        steps = run.life.steps()
        yield step_of_sft if is_sft else step_of_grpo


def cpu_seconds_so_far() -> float:
    """CPU seconds of this process and of those that it has started, which live as long as the run; not of Ray's."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in times)


def main() -> None:
    path, cluster, *overrides = sys.argv[1:]
    # What libraries print must not come between the lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = read_run(Path(path), overrides).config
    if config is None:
        raise SystemExit(f"{path} is no configuration")
    is_local = cluster not in ("ray", "ranks")
    if is_local:
        threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
        os.environ |= worker_environment("cpu", ranks_per_node=1) | threads
    quiet_libraries()

    def say(**told: object) -> None:
        print(json.dumps(told), file=answers, flush=True)

    with opened(for_task(config, config.trainer.stage), is_local) as take_step:
        clock = step_parts.watched() if cluster == "parts" else None
        say(ready=True)
        while sys.stdin.readline():
            if clock is not None:
                clock.take()
            start, cpu_start = time.perf_counter(), cpu_seconds_so_far()
            metrics = take_step()
            seconds, cpu_seconds = time.perf_counter() - start, cpu_seconds_so_far() - cpu_start
            told = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
            parts = None if clock is None else clock.take()
            tokens, loss = metrics["tokens"], metrics.get("actor/loss")
            say(seconds=seconds, cpu_seconds=cpu_seconds, tokens=tokens, loss=loss, phases=told, parts=parts)


if __name__ == "__main__":
    main()
