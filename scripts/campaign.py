"""Kill ranks of repairing runs at random seconds and compare with unhurt runs: the table of docs/reliability.md.

    python scripts/campaign.py --kills 12 --seed 1 [--kinds demo split ahead] [--out FOLDER]

Each kind is one run with trainer.max_repairs that loses a random rank again and again: killed, or every fifth time
stopped. Then the same run unhurt, or, where generation runs ahead, the replay of the hurt run's schedule. Exit code 1
if any metric or exported weight differs, or if a process, folder or segment of the hurt run is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_rl.cluster.leftovers import RUN_ID, processes_with, variable_of
from megatron_rl.cluster.scratch import PREFIX, SEGMENTS

REPOSITORY = Path(__file__).parents[1]
SHORT = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.launcher=local",
    "trainer.heartbeat_timeout_s=10",
)
KINDS = {"demo": "demo_cpu", "split": "split_cpu", "ahead": "async_cpu"}
CLOCKED = ("timing_s/", "perf/", "reshard/", "repair/", "memory", "trainer/idle", "rollout/idle", "rollout/pause")
"""Metrics that measure the machine, and those of repairs."""
QUIET_S = (1.0, 8.0)
"""Seconds between the step after a repair and the next kill."""


@dataclass
class Outcome:
    """What one kind of run went through. seconds: of each repair."""

    kind: str
    kills: int
    seconds: list[float]
    steps_lost: list[int]
    differences: list[str]
    left: list[str]

    def row(self) -> str:
        """One row of the table."""
        median, worst = statistics.median(self.seconds), max(self.seconds)
        lost, same = max(self.steps_lost), "the same" if not self.differences else f"{len(self.differences)} differ"
        return f"| {self.kind} | {self.kills} | {median:.1f} | {worst:.1f} | {lost} | {same} | {len(self.left)} |"


def command(kind: str, folder: Path, *overrides: str) -> list[str]:
    """The command of a run of a kind."""
    train = [sys.executable, "-m", "megatron_rl", "train", "--config", f"configs/{KINDS[kind]}.yaml"]
    return [*train, *SHORT, f"trainer.default_local_dir={folder}", *overrides]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in the repository."""
    return subprocess.Popen(arguments, cwd=REPOSITORY, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def num_lines(file: Path) -> int:
    """Return the number of lines of a file, or 0 without a file."""
    return file.read_text().count("\n") if file.exists() else 0


def ranks_below(pid: int) -> list[psutil.Process]:
    """The ranks of the run with this controller, without those of replicas, which are restarted alone."""
    ranks = [process for process in psutil.Process(pid).children(recursive=True) if process.name().startswith("rank ")]
    return [rank for rank in ranks if "/" not in "".join(rank.cmdline()[:1])]


def hurt(run: subprocess.Popen[bytes], folder: Path, kills: int, draw: random.Random) -> int:
    """Kill or stop a random rank so many times, each after another step; returns how many it became."""
    for number in range(kills):
        before, repairs = num_lines(folder / "metrics.jsonl"), num_lines(folder / "repairs.jsonl")
        while run.poll() is None and (repairs < number or num_lines(folder / "metrics.jsonl") <= before):
            repairs = num_lines(folder / "repairs.jsonl")
            time.sleep(0.05)
        time.sleep(draw.uniform(*QUIET_S))
        ranks = ranks_below(run.pid) if run.poll() is None else []
        if not ranks:
            return number
        draw.choice(ranks).send_signal(signal.SIGSTOP if number % 5 == 4 else signal.SIGKILL)
    while run.poll() is None and num_lines(folder / "repairs.jsonl") < kills:
        time.sleep(0.05)
    return kills


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> its metrics without clocks."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in lines
    }


def differences(hurt_folder: Path, well: Path) -> list[str]:
    """Names of metrics, by step, and of files of weights that differ."""
    ours, theirs = metrics(hurt_folder), metrics(well)
    names = [
        f"{step} {name}"
        for step in sorted(ours.keys() | theirs.keys())
        for name in ours.get(step, {}).keys() | theirs.get(step, {}).keys()
        if ours.get(step, {}).get(name) != theirs.get(step, {}).get(name)
    ]
    file = "hf_model/model.safetensors"
    return names if (hurt_folder / file).read_bytes() == (well / file).read_bytes() else [*names, file]


def left_of(run_ids: set[str]) -> list[str]:
    """Processes, folders and segments that runs have left."""
    left = [str(process) for run_id in run_ids for process in processes_with(run_id)]
    for run_id in run_ids:
        left += map(str, SEGMENTS.glob(f"{PREFIX}{run_id}-*"))
        left += map(str, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{run_id}"))
    return left


def campaign(kind: str, kills: int, seed: int, out: Path) -> Outcome:
    """Hurt one run, run the other, compare. Raises RuntimeError where a run did not end well, with its output."""
    out.mkdir(parents=True)
    steps, folder, well = f"trainer.total_training_steps={3 * kills + 4}", out / "hurt", out / "well"
    run = start(command(kind, folder, steps, f"trainer.max_repairs={kills}"), out / "hurt.log")
    run_ids = set[str]()
    while run.poll() is None and not run_ids:
        run_ids = {name for name in (variable_of(rank, RUN_ID) for rank in ranks_below(run.pid)) if name}
        time.sleep(0.2)
    num_kills = hurt(run, folder, kills, random.Random(f"{seed} {kind}"))
    if run.wait() != 0:
        raise RuntimeError(f"{kind} ended with code {run.returncode}:\n{(out / 'hurt.log').read_text()[-3000:]}")
    left = left_of(run_ids)
    again = ["--replay", str(folder)] if kind == "ahead" else []
    # A copy begins unfinished answers anew, so the unhurt run copies as well.
    unhurt = start([*command(kind, well, steps, *again)], out / "well.log")
    if unhurt.wait() != 0:
        raise RuntimeError(
            f"unhurt {kind} ended with code {unhurt.returncode}:\n{(out / 'well.log').read_text()[-3000:]}"
        )
    repairs = [json.loads(line) for line in (folder / "repairs.jsonl").read_text().splitlines()]
    seconds, lost = [each["seconds"] for each in repairs], [each["steps_lost"] for each in repairs]
    return Outcome(kind, num_kills, seconds, lost, differences(folder, well), left)


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="campaign_"))
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    outcomes = []
    print("| run | kills | median s to the next step | worst | steps lost, most | metrics and weights | left |")
    print("|---|---|---|---|---|---|---|")
    for kind in given.kinds:
        outcomes.append(campaign(kind, given.kills, given.seed, out / kind))
        print(outcomes[-1].row(), flush=True)
        for text in (*outcomes[-1].differences[:10], *outcomes[-1].left):
            print(f"  {kind}: {text}")
    return int(any(outcome.differences or outcome.left for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
