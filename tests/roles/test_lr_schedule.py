"""Learning rates of a schedule, update by update, computed by hand."""

import math

import pytest
import torch

from megatron_rl.config.batch_sizes import BatchSizes
from megatron_rl.config.megatron import OptimConfig
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.config.schema import ActorConfig, ActorRolloutRefConfig, DataConfig, RunConfig
from megatron_rl.experience.batches import mini_batch_rows
from megatron_rl.roles.rank import in_optimizer_steps
from megatron_rl.roles.training import lr_scheduler


def learning_rates(optim: OptimConfig, num_run_steps: int, num_updates: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    scheduler = lr_scheduler(optimizer, optim, num_run_steps)
    rates = []
    for _ in range(num_updates):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return rates


def test_constant():
    """No warm-up, nothing decays however long the run is. Would not catch a group with its own rate."""
    assert learning_rates(OptimConfig(lr=0.5), num_run_steps=3, num_updates=5) == [0.5] * 5


def test_warm_up_then_linear_decay_over_the_run():
    """0, 1/2, 1 while warming up, then 4 steps down to the floor. Would not catch a decay of another style."""
    optim = OptimConfig(lr=1.0, min_lr=0.2, lr_warmup_steps=2, lr_decay_style="linear")
    expected = [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert learning_rates(optim, num_run_steps=6, num_updates=8) == pytest.approx(expected)


def test_cosine_over_its_own_length():
    """Half a cosine in 4 steps, although the run is longer. Would not catch a warm-up."""
    optim = OptimConfig(lr=2.0, lr_decay_style="cosine", lr_decay_steps=4)
    expected = [2.0, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4), 0.0]
    assert learning_rates(optim, num_run_steps=100, num_updates=5) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "last"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("exponential", [1.0, 2**0.75 - 1, 2**0.5 - 1, 2**0.25 - 1, 0.0]),
        ("minus_sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
    ],
)
def test_only_the_last_steps_go_down(style, last):
    """A warm-up of one step, two at the peak, and four that go down. Would not catch a restart after them."""
    optim = OptimConfig(lr=1.0, lr_warmup_steps=1, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_steps=4)
    expected = [0.0, 1.0, 1.0, *last]
    assert learning_rates(optim, num_run_steps=7, num_updates=8) == pytest.approx(expected, abs=1e-12)


def test_steps_of_a_run():
    """Counted as the loop makes them, an uneven last mini-batch included. Would not catch skipped updates."""
    per_step = sum(1 for _ in mini_batch_rows(60 * 12, 25 * 12, 2, seed=None))
    config = RunConfig(DataConfig(train_batch_size=60), ActorRolloutRefConfig(rollout=RolloutConfig(n=12)))
    actor = ActorConfig(ppo_mini_batch_size=25, ppo_epochs=2)
    assert config.batch_sizes.num_optimizer_steps(actor) == per_step == 6


def test_a_mini_batch_has_no_more_than_the_step():
    """4 prompts of 3 samples, 5 of which would be an optimizer step. Would not catch an uneven split over ranks."""
    sizes = BatchSizes(num_prompts=4, num_generated_prompts=6, samples_per_prompt=3)
    actor = ActorConfig(ppo_mini_batch_size=5, ppo_epochs=2)
    assert (sizes.num_samples, sizes.num_generated_samples) == (12, 18)
    assert (sizes.mini_batch_prompts(actor), sizes.mini_batch_samples(actor)) == (4, 12)
    assert sizes.num_optimizer_steps(actor) == 2


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"),
    [(2, 0.0, (12, 18)), (0, 0.25, (12, 18)), (2, 0.5, (12, 18)), (0, 0.0, (0, 18))],
)
def test_warm_up_and_decay_count_training_steps(steps, ratio, expected):
    """8 steps of 6 updates each; a share of the run counts where no steps are given. Would not catch a skipped one."""
    optim = OptimConfig(lr_warmup_steps=steps, lr_warmup_steps_ratio=ratio, lr_decay_steps=3, lr_wsd_decay_steps=2)
    found = in_optimizer_steps(optim, num_steps=8, num_optimizer_steps=48)
    assert (found.lr_warmup_steps, found.lr_decay_steps, found.lr_wsd_decay_steps) == (*expected, 12)
