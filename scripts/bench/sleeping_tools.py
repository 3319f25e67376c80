"""How much of the waits for tools, and of a rule's seconds, a step hides behind its generation.

    python scripts/bench/sleeping_tools.py [--episodes 64] [--rounds 5] [--mean 0.4] [--slice-steps 16]

The demo's model on one rank. An episode has one to six turns, after each of which its environment sleeps for a
time drawn from a log-normal distribution of the given mean in seconds (sigma 1). Each round draws the same episodes
three times: without a sleep (`engine`), as a training step does (`step`), and every turn of all episodes together, then
all answers (`by turns`). `step / bound` compares the step with the engine's seconds or the sleeps of the longest
episode, whichever is more.

A rule sleeps for every answer, in processes, half as long in all as the step lasts. `hidden` is the share of these
seconds that the step does not wait for. Figures are medians of the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_rl.config.load import read_config
from megatron_rl.controller.repairs import repairs_of
from megatron_rl.controller.run import Run, open_run
from megatron_rl.records import prompts_of
from megatron_rl.scoring.batch_scorers import score
from megatron_rl.scoring.sampled_batch import SampledBatch

REPOSITORY = Path(__file__).parents[2]
GRPO = REPOSITORY / "configs" / "grpo_cpu.yaml"
SIGMA, MOST_TURNS, RULE_PROCESSES = 1.0, 6, 4


def delays(index: int, sample: int, mean: float) -> list[float]:
    """The seconds for which the environment of an episode sleeps after each of its turns."""
    draw = random.Random(1_000 * index + sample)
    return [draw.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA) for _ in range(draw.randint(1, MOST_TURNS))]


class Sleeper:
    """Sleeps after each turn, and rewards nothing. file: holds the seconds of the mean, 0 for no sleep."""

    def __init__(self, file: str, mean: float) -> None:
        self.file, self.mean = Path(file), mean

    def reset(self, row: dict[str, Any]) -> None:
        """Draw the delays of the episode."""
        self.delays = delays(row["index"], row["sample"], self.mean)
        self.sleeps = self.file.read_text() == "sleep"

    async def step(self, turn: Any) -> tuple[str | None, float, bool]:
        """Sleep as drawn."""
        delay = self.delays.pop(0)
        if self.sleeps:
            await asyncio.sleep(delay)
        return ("1", 0.0, False) if self.delays else (None, 0.0, True)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, file: str) -> float:
    """Sleep for the seconds that the file holds."""
    time.sleep(float(Path(file).read_text()))
    return 0.0


def bench_config(folder: Path, given: argparse.Namespace) -> Any:
    """The demo with sleeping environments and a sleeping rule."""
    turns, rule = "actor_rollout_ref.rollout.multi_turn", "custom_reward_function"
    environment = {"file": str(folder / "mode"), "mean": given.mean}
    config, _ = read_config(
        GRPO,
        [
            *(f"data.train_batch_size={given.episodes // 8}", "actor_rollout_ref.rollout.n=8"),
            *(f"{turns}.environment.path={__file__}", f"{turns}.environment.name=Sleeper"),
            *(f"{turns}.environment.kwargs={json.dumps(environment)}", f"{turns}.max_assistant_turns={MOST_TURNS}"),
            *(f"{rule}.path={__file__}", f"{rule}.name=compute_score", f"{rule}.reward_kwargs.file={folder / 'rule'}"),
            *(f"reward_model.num_workers={RULE_PROCESSES}", f"async_training.slice_steps={given.slice_steps}"),
            *(
                f"{turns}.enable=true",
                "data.max_response_length=40",
                f"trainer.total_training_steps={2 * given.rounds + 1}",
            ),
            *("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
            *(f"actor_rollout_ref.actor.ppo_mini_batch_size={given.episodes // 8}", "trainer.launcher=local"),
            *(f"trainer.default_local_dir={folder / 'run'}", "trainer.validation_data_dir=null"),
        ],
    )
    return config


def measure(run: Run, folder: Path, given: argparse.Namespace) -> list[dict[str, float]]:
    """Figures of each round. The first step, which starts processes, is not counted."""
    mode, rule, rounds = folder / "mode", folder / "rule", []
    mode.write_text("no sleep")
    rule.write_text("0")
    run.sampler.next(1)
    run.sampler.load_weights(1)
    for number in range(given.rounds):
        mode.write_text("no sleep")
        rule.write_text("0")
        begun = time.monotonic()
        prompts = prompts_of(run.sampler.next(2 * number + 2).rows)
        figures = {"engine": time.monotonic() - begun}
        run.sampler.load_weights(2 * number + 2)
        mode.write_text("sleep")
        begun = time.monotonic()
        mixed = run.sampler.rules
        run.sampler.rules = dataclasses.replace(mixed, awaits_turns=True)
        run.sampler.answer(prompts, run.sampler.sampling(1))
        run.sampler.rules = mixed
        figures["by turns"] = time.monotonic() - begun
        figures |= _step(run, 2 * number + 3, rule, given, figures["engine"])
        rounds.append(figures)
    return rounds


def _step(run: Run, step: int, rule: Path, given: argparse.Namespace, engine: float) -> dict[str, float]:
    """Figures of a step whose environments and whose rule sleep."""
    rule_seconds = engine / 2
    rule.write_text(str(rule_seconds * RULE_PROCESSES / given.episodes))
    begun = time.monotonic()
    batch: SampledBatch = run.sampler.next(step)
    seconds = time.monotonic() - begun
    run.sampler.load_weights(step)
    rows = zip(batch.rows["index"].tolist(), batch.rows["sample"].tolist(), strict=True)
    longest = max(sum(delays(index, sample, given.mean)) for index, sample in rows)
    begun = time.monotonic()
    score(run.scorers[-1:], batch)
    waited = time.monotonic() - begun
    bound = max(engine, longest)
    return {"step": seconds, "longest": longest, "step / bound": seconds / bound, "hidden": 1 - waited / rule_seconds}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mean", type=float, default=0.4)
    parser.add_argument("--slice-steps", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = bench_config(folder, given)
        with repairs_of(config) as repairs, open_run(repairs) as run:
            rounds = measure(run, folder, given)
    for figures in rounds:
        figures["by turns / step"] = figures["by turns"] / figures["step"]
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        print(f"{name:16} {statistics.median(values):6.2f}  ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
