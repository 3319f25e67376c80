"""Two thousand steps in one process: nothing that it holds grows with them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from command_line import REPOSITORY
from long_night import ALLOWED, METRICS, SAMPLES, Held, Slope, is_crowded, slopes, table, watch
from short_runs import LOCAL, steps_saved

DEMO = REPOSITORY / "assets" / "demo"
NUM_STEPS, SAVED_EVERY = 2000, 50


def test_slopes_by_hand() -> None:
    """A line without noise; and 0, 1, 0, 1, whose slope is 1/5 with residuals -0.2, 0.6, -0.6, 0.2, so that the error
    is the root of 0.8 / 2 / 5. Would not catch noise that hangs together.
    """
    assert Slope.of([(0, 1.0), (1, 3.0), (2, 5.0)]) == Slope(2.0, 0.0, 4.0, 3.0)
    noisy = Slope.of([(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)])
    assert (noisy.slope, noisy.error, noisy.gained, noisy.mean) == pytest.approx((0.2, 0.08**0.5, 0.6, 0.5))
    assert noisy.is_flat(0.0) and not Slope.of([(0, 1.0), (1, 3.0), (2, 5.0)]).is_flat(1.0)


def test_what_grows_is_seen(tmp_path: Path) -> None:
    """One file more in a hundred steps, 20 KB of memory a step on 1 GB, a checkpoint too many each hundred steps, and a
    step that takes a fifth longer at the end; not a thread that comes and goes. Would not catch growth that ends.
    """
    lines = [json.dumps({"step": step, "timing_s/step": 0.1 + 2e-5 * step}) for step in range(1, 2001)]
    (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines))
    seen = [
        Held(step, 10**9 + 20_000 * step, 130 + step // 100, 100 + step % 3, 31, 10**6 * (3 + step // 100), 0.2 * step)
        for step in range(10, 2001, 10)
    ]
    found = slopes(seen, tmp_path)
    assert {name for name, slope in found.items() if not slope.is_flat(ALLOWED[name])} == {
        "memory, MB",
        "open files",
        "folder, MB",
        "seconds a step",
    }
    assert (found["CPU seconds a step"].mean, found["CPU seconds a step"].gained) == pytest.approx((0.2, 0.0))
    assert found["memory, MB"].gained == pytest.approx(20e3 * 990 / 1e6)
    assert table(found).count("GROWS") == 4


def smallest_model(folder: Path) -> Path:
    """A random model of one layer that reads the demo's tokens."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(DEMO / "model", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.hidden_size, config.intermediate_size = 64, 64
    config.num_attention_heads, config.num_key_value_heads = 2, 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(7200)
def test_a_long_night_is_flat(command_line, tmp_path: Path) -> None:
    """PPO with critic and reference, saved every 50 steps and validated every 250, in one process. Memory, open files,
    threads, sockets, the folder beside its logs and the seconds of a step (CPU seconds alone on a crowded machine) are
    flat over the second half; of checkpoints two are left; a step adds one line, of the same length, to each log, and a
    file of the same size of recorded samples. Would
    not catch ranks of several processes.
    """
    model, held_out = smallest_model(tmp_path / "model"), tmp_path / "held_out.parquet"
    pq.write_table(pq.read_table(DEMO / "test.parquet").slice(0, 16), held_out)
    actor = "actor_rollout_ref.actor"
    run = command_line(
        *LOCAL,
        *(f"actor_rollout_ref.model.path={model}", "data.train_batch_size=2", f"{actor}.ppo_mini_batch_size=2"),
        *("actor_rollout_ref.rollout.n=2", f"{actor}.ppo_epochs=1", f"{actor}.optim.lr=1e-5"),
        *(f"data.val_files={held_out}", "trainer.val_before_train=false", "trainer.test_freq=250"),
        *(f"trainer.save_freq={SAVED_EVERY}", "trainer.max_ckpt_to_keep=2"),
        f"trainer.total_training_steps={NUM_STEPS}",
    )
    seen = watch(psutil.Process(run.process.pid), run.run)
    assert run.wait() == 0, run.text()[-4000:]
    found = slopes(seen, run.run)
    print(table(found))
    judged = ALLOWED.keys() - ({"seconds a step"} if is_crowded() else set())
    assert [name for name in judged if not found[name].is_flat(ALLOWED[name])] == [], table(found)
    assert steps_saved(run) == [NUM_STEPS, NUM_STEPS - SAVED_EVERY]
    lengths = sorted(len(line) for line in run.metrics().splitlines())
    assert len(lengths) == NUM_STEPS and lengths[-1] < 2 * lengths[0]
    assert len(run.text().splitlines()) < NUM_STEPS + 300
    recorded = sorted(file.stat().st_size for file in (run.run / SAMPLES).iterdir())
    assert len(recorded) == NUM_STEPS and recorded[-1] < 2 * recorded[0]
