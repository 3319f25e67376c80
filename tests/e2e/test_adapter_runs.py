"""Runs that train adapters, as users start them: in one process, over pools, ahead of training, of every task."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from short_runs import LOCAL, SHORT, TP2, WITHOUT_RAY, metrics
from stage_files import keys_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

ADAPTERS = ("actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.model.lora.alpha=8")
THREE_POOLS = (
    *("trainer.n_gpus_per_node=1", "pools.critic.n_gpus_per_node=1", "pools.rollout.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",),
    *("critic.megatron.pipeline_model_parallel_size=1", WITHOUT_RAY),
)
FEW = (*SHORT, "trainer.total_training_steps=3", "trainer.export_hf=false")
BETWEEN_ENGINES = ("training/rollout_", "rollout_corr/log_ppl_diff")
"""Metrics of the difference between two engines, which is all rounding."""
WAITED = ("memory/", "rollout/", "trainer/")
"""Metrics of memory, and of who waited for whom."""
MOVED = "reshard/received_mb"


def numbers(run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in line.items() if not name.startswith(BETWEEN_ENGINES)}
        for step, line in metrics(run).items()
    }


def moved(run) -> list[float]:
    """Megabytes that each step brought to rollout mode."""
    return [json.loads(line)[MOVED] for line in run.metrics().splitlines() if MOVED in line]


def adapter_megabytes() -> float:
    """The adapters of the demo's model, float32, held with vLLM's eight rows: by hand from its config.json."""
    settings = json.loads(Path("assets/demo/model/config.json").read_text())
    hidden, ffn, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_attention_heads"]
    size = settings.get("head_dim") or hidden // heads
    q, kv = heads * size, settings["num_key_value_heads"] * size
    rows = (hidden + q) + 2 * (hidden + kv) + (q + hidden) + 2 * (hidden + ffn) + (ffn + hidden)
    return 4 * 8 * rows * settings["num_hidden_layers"] / 1e6


def test_adapters_over_pools(command_line) -> None:
    """Critic, rollout and actor on a pool each compute what one process does, and adapters alone are transferred.

    Would not catch what all layouts compute wrong; tests/dist/test_adapter_parity.py does.
    """
    split = command_line(*FEW, *ADAPTERS, *THREE_POOLS, config="configs/split_cpu.yaml")
    assert split.wait() == 0, split.text()
    whole = command_line(*FEW, *ADAPTERS, *LOCAL)
    assert whole.wait() == 0, whole.text()
    found, expected = numbers(split), numbers(whole)
    assert list(found) == list(expected) == [1, 2, 3]
    for step, line in expected.items():
        assert found[step].keys() >= line.keys()
        for name, value in line.items():
            assert found[step][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, name)
    assert moved(split) == pytest.approx([adapter_megabytes()] * 3, rel=1e-6)
    assert moved(whole) == [0.0] * 3
    assert expected[1]["actor/reward_kl_penalty"] == found[1]["actor/reward_kl_penalty"] == 0  # exactly


@pytest.mark.exhaustive
def test_adapters_ahead_of_training(command_line) -> None:
    """A run ahead repeats its own schedule bit for bit. Would not catch another schedule."""
    keys = (*FEW, *ADAPTERS, WITHOUT_RAY)
    first = command_line(*keys, config="configs/async_cpu.yaml")
    assert first.wait() == 0, first.text()
    again = command_line(*keys, f"--replay={first.run}", config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    found, expected = (
        {
            step: {name: value for name, value in line.items() if not name.startswith(WAITED)}
            for step, line in run.items()
        }
        for run in (metrics(again), metrics(first))
    )
    assert found == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["sft", "dpo", "dpo on the fly", "reward"])
def test_adapters_in_other_tasks(command_line, files: Path, task: str) -> None:
    """TP2 as one process, and the loss falls. Would not catch a loss that is another than full training's."""
    adapters = ADAPTERS if task != "reward" else ("critic.model.lora.rank=4", "critic.model.lora.alpha=8")
    keys = (*keys_of(files, task), *adapters, "trainer.export_hf=false", "trainer.save_freq=-1")
    command = task.split()[0]
    whole = command_line(*keys, *LOCAL, stage=command)
    assert whole.wait() == 0, whole.text()
    cut = command_line(*keys, *TP2, WITHOUT_RAY, stage=command)
    assert cut.wait() == 0, cut.text()
    name = "critic/loss" if task == "reward" else "actor/loss"
    losses, others = ([line[name] for line in metrics(run).values() if name in line] for run in (whole, cut))
    assert others == pytest.approx(losses, rel=1e-4, abs=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_dpo_compares_with_the_adapter_that_it_starts_from(command_line, files: Path) -> None:
    """Stored or on the fly the first loss is log 2. Who goes on after a step compares with the same adapter, to the
    last bit, and is refused without it.

    Would not catch a reference that is another model both ways.
    """
    few = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=0", "trainer.export_hf=false")
    start = command_line(*keys_of(files, "sft"), *ADAPTERS, *LOCAL, "trainer.save_freq=-1", stage="sft")
    assert start.wait() == 0, start.text()
    adapter = f"actor_rollout_ref.model.lora.adapter_path={start.run / 'adapter'}"
    of_reference = {}
    for reference in ("dpo", "dpo on the fly"):
        run = command_line(*keys_of(files, reference), *few, *ADAPTERS, adapter, *LOCAL, stage="dpo")
        assert run.wait() == 0, run.text()
        of_reference[reference] = losses(run)
    first, second = of_reference["dpo on the fly"]
    assert first == pytest.approx(math.log(2), abs=1e-6) and abs(second - first) > 1e-3
    assert of_reference["dpo"] == pytest.approx([first, second], rel=1e-5)
    saved = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.run / 'global_step_1'}")
    resumed = command_line(*keys_of(files, reference), *few, *ADAPTERS, adapter, *LOCAL, *saved, stage="dpo")
    assert resumed.wait() == 0, resumed.text()
    assert losses(resumed) == [second]
    without = command_line(*keys_of(files, reference), *few, *ADAPTERS, *LOCAL, *saved, stage="dpo")
    assert without.wait() == 2 and "and configured is no adapter" in " ".join(without.text().split())


def losses(run) -> list[float]:
    """The actor's loss in each step."""
    return [line["actor/loss"] for line in metrics(run).values() if "actor/loss" in line]


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_demo_learns_with_adapters(command_line) -> None:
    """configs/lora_cpu.yaml: rank 8, 20 steps, TP2 x PP2. Would not catch other seeds."""
    run = command_line(WITHOUT_RAY, config="configs/lora_cpu.yaml")
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_after"] >= 0.97
