"""Run training as its users do, stop it in the middle, start it again, and kill it where it no longer moves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.trials.golden import Golden
from megatron_rl.trials.metrics_file import read_metrics
from megatron_rl.trials.process import living
from megatron_rl.trials.verdict import Life

POLL_S = 0.2
OUTPUT = "output.txt"


def run_lives(golden: Golden, config: Path, folder: Path, overrides: Sequence[str]) -> list[Life]:
    """One life that is stopped after `golden.stop_after_step`, and, unless that ends ill, one to the end.

    Writes `folder`/run and what they print to `folder`/output.txt. `folder` must have no run in it yet.
    """
    command = [sys.executable, "-m", "megatron_rl", "train", "--config", str(config), *overrides]
    command += [f"trainer.default_local_dir={folder / 'run'}", f"trainer.total_training_steps={golden.steps}"]
    lives: list[Life] = []
    for stop_after in (golden.stop_after_step, 0) if golden.stop_after_step else (0,):
        lives.append(live(command, golden, folder, stop_after))
        if not lives[-1].ended_well or lives[-1].finished:
            break
    return lives


def live(command: Sequence[str], golden: Golden, folder: Path, stop_after: int) -> Life:
    """One process, from its start to its end; SIGTERM once `stop_after` is logged (0: never); SIGKILL when it hangs."""
    metrics = folder / "run" / "metrics.jsonl"
    started = moved = time.monotonic()
    first = last = _last_step(metrics)
    to_stop, hung_after_s = False, None
    with living(command, folder / OUTPUT) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            now, step = time.monotonic(), _last_step(metrics)
            if step > last:
                moved, last = now, step
            if stop_after and step >= stop_after and not to_stop:
                process.send_signal(signal.SIGTERM)
                to_stop = True
            patience = golden.first_step_within_s if last == first else golden.step_within_s
            if now - moved > patience:
                hung_after_s = now - moved
                process.kill()
                break
    return Life(process.returncode, time.monotonic() - started, _last_step(metrics), to_stop, hung_after_s)


def _last_step(metrics: Path) -> int:
    return max(read_metrics(metrics), default=0)
