"""GRPO steps of this package in one process, each when a line comes in. `step.py` starts it.

    python scripts/bench/step_ours.py CONFIG local|ray [DOTTED=OVERRIDE ...]

Builds what `megatron-rl train` builds, with `--local` or through Ray, and takes the steps of its loop. A line of JSON
says that it is ready, and one for each step what it came to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from megatron_rl.config.load import read_run
from megatron_rl.observe.quiet import quiet_engines, quiet_libraries
from megatron_rl.roles.environment import worker_environment


def main() -> None:
    path, cluster, *overrides = sys.argv[1:]
    # What libraries print must not come between the lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = read_run(Path(path), overrides).config
    if config is None:
        raise SystemExit(f"{path} is no configuration")
    if cluster == "local":
        threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
        os.environ |= worker_environment("cpu", ranks_per_node=1) | threads
        quiet_engines()
    quiet_libraries()

    from megatron_rl.run import open_run
    from megatron_rl.train import take_step

    def say(**told: object) -> None:
        print(json.dumps(told), file=answers, flush=True)

    with open_run(config, local=cluster == "local") as run:
        say(ready=True)
        steps = run.life.steps()
        while sys.stdin.readline():
            step = next(steps)
            start, cpu_start = time.perf_counter(), time.process_time()
            metrics = take_step(run, step)
            run.book.log(metrics, step)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            told = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
            tokens = metrics["response_length/mean"] * config.data.train_batch_size * config.actor_rollout_ref.rollout.n
            say(seconds=seconds, cpu_seconds=cpu_seconds, tokens=tokens, phases=told)


if __name__ == "__main__":
    main()
