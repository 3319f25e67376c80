"""What running ahead saves where groups are filtered: the real scheduler on a simulated clock.

    python scripts/bench/filtered_step.py [--steps 14]

Groups of 8 responses, as in configs/dapo_cpu.yaml; a share of them is uniform and is replaced. in turns: without
`rollout_ahead`, whole generation batches, then training. ahead: one step ahead, groups are replaced one by one while
training runs. Both on two replicas. A training step takes as long as one generation batch on engines that are always
full. Engines are not real here, and the controller costs nothing: real ones can only make both arms slower.
"""

from __future__ import annotations

import argparse
from functools import cache
from random import Random

from megatron_rl.sampling.engine_model import Costs
from megatron_rl.sampling.schedule_types import KeptGroups, ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.sampling.simulate import simulate

REPLICAS, GROUPS, SIZE, RUNNING = 2, 64, 8, 64
STEP_S, TRANSFER_S, VERDICT_S = 0.004, 0.03, 0.01
FIRST, LAST = 3, 3
"""Steps at either end that are not measured."""


@cache
def length(request: int, attempt: int) -> int:
    """Return about 100 tokens; one response in 32 is 4 times longer."""
    tokens = round(Random(f"{request} {attempt}").uniform(75, 125))
    return tokens * 4 if request % 32 == 7 else tokens


def step_seconds(ahead: int, uniform: float, num_steps: int) -> float:
    """Return the mean seconds of a step."""
    rules = ScheduleConfig(
        GROUPS * SIZE,
        num_steps,
        ahead,
        slice_steps=32 if ahead else None,
        max_running=RUNNING,
        max_queued=8,
        group_size=SIZE,
        filtered=KeptGroups(GROUPS, 4 * GROUPS),
    )
    tokens = sum(length(request, 0) for request in range(GROUPS * SIZE))
    costs = Costs(lambda running: STEP_S, tokens * STEP_S / (REPLICAS * RUNNING), TRANSFER_S, TRANSFER_S)
    outcome = simulate(
        Scheduler(rules, REPLICAS),
        rules,
        REPLICAS,
        length,
        costs,
        judge=lambda group: ("uniform" if Random(f"{group} verdict").random() < uniform else "kept", VERDICT_S),
    )
    return (outcome.steps[-1 - LAST] - outcome.steps[FIRST - 1]) / (num_steps - FIRST - LAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    num_steps = parser.parse_args().steps
    for uniform in (0.25, 0.5, 0.7):
        turns, ahead = (step_seconds(steps, uniform, num_steps) for steps in (0, 1))
        print(f"uniform {uniform:.0%}: in turns {turns:.2f} s, ahead {ahead:.2f} s a step, ratio {ahead / turns:.2f}")


if __name__ == "__main__":
    main()
