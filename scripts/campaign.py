"""Strike runs at random moments and compare them with unhurt ones: the table of docs/internals/measured.md.

    python scripts/campaign.py --kills 50 --seed 1                        # everything that this machine permits
    python scripts/campaign.py --kills 2 --kinds demo controller          # a short form

Runs that repair themselves lose ranks, replicas, reward processes and nodes again and again. Runs without repairs lose
their controller, a daemon of Ray, or the room on their disk; they must end with a sentence and the right exit code, and
the same command goes on from the last checkpoint. At the end metrics and exported weights are compared, bit for bit,
with those of a run that was never hurt, or, where generation runs ahead, with the replay of the hurt run's schedule.
Exit code 1 if anything differs, was left, or ended without a sentence.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from campaigns.struck_runs import (
    LOCAL,
    REPOSITORY,
    Outcome,
    StruckRun,
    differences,
    named,
    pause,
    reward_processes,
    strike,
    training_ranks,
)

RAY = "trainer.launcher=ray"
SKIPPED = {
    "slow disk": "the kernel here has no device that delays writes",
    "clock jump": "the clock is that of all processes of the machine",
    "cut port": "no firewall is installed",
}
DISK_MB = 400
STOPPED_S = 20.0
"""Seconds that a controller stands still, twice what a rank may be silent."""


@dataclass(frozen=True)
class Repaired:
    """Strikes that a run repairs itself. choose: draws the process among those below the controller."""

    run: str
    struck: str
    choose: Callable[[list[psutil.Process]], list[psutil.Process]]
    share: float = 1.0
    """The part of the kills that were asked for."""


REPAIRED = {
    "demo": Repaired("demo", "rank: killed, every fifth time stopped", training_ranks, 0.5),
    "split": Repaired("split", "rank: killed, every fifth time stopped", training_ranks, 0.3),
    "ahead": Repaired("ahead", "training rank: killed, every fifth time stopped", training_ranks, 0.2),
    "sft": Repaired("sft", "rank: killed, every fifth time stopped", training_ranks, 0.1),
    "reward": Repaired("demo", "process of the reward function", reward_processes, 0.1),
}


def repaired(kind: Repaired, kills: int, draw: random.Random, out: Path) -> Outcome:
    """Strike one run again and again, each time after another step; then compare."""
    is_reward = kind.choose is reward_processes
    steps = f"trainer.total_training_steps={3 * kills + 4}"
    repairs = () if is_reward else (f"trainer.max_repairs={kills}",)
    run = StruckRun(kind.run, out / "hurt", out / "hurt.log", LOCAL, steps, *repairs)
    outcome = Outcome(kind.struck, kind.run)
    for number in range(kills):
        if not run.goes_on(0 if is_reward else number):
            break
        pause(draw, 0.2, 3.0)
        chosen = kind.choose(run.family())
        if not chosen:
            break
        strike(draw.choice(chosen), signal.SIGSTOP if number % 5 == 4 and not is_reward else signal.SIGKILL)
        outcome.num_strikes += 1
    run.succeed()
    outcome.left = run.left()
    outcome.note_repairs(run.folder)
    compare(outcome, run.folder, out, LOCAL, steps)
    return outcome


def compare(outcome: Outcome, struck: Path, out: Path, *keys: str) -> None:
    """Note how a struck run differs from one that nothing strikes, or, where it ran ahead, from its own replay."""
    again = ("--replay", str(struck)) if outcome.run == "ahead" else ()
    well = StruckRun(outcome.run, out / "well", out / "well.log", *keys, *again)
    well.succeed()
    outcome.differences = differences(struck, well.folder)


@dataclass(frozen=True)
class Ended:
    """Strikes that end a run, which is then started again. codes: with which it may end. launcher: of the run.

    names: what the run's last lines must contain; "" where it cannot speak. run: in `CONFIGS`. share: of the kills that
    were asked for.
    """

    struck: str
    launcher: str
    codes: tuple[int, ...]
    names: str = ""
    run: str = "demo"
    share: float = 0.1


CONTROLLER = Ended("controller, on this machine", LOCAL, (-signal.SIGKILL,))
ON_RAY = replace(CONTROLLER, struck="controller, on Ray", launcher=RAY)
GCS = Ended("Ray's GCS server", RAY, (3,), "gcs_server")
ENDED = {
    "controller": CONTROLLER,
    "controller_split": replace(CONTROLLER, run="split"),
    "controller_ahead": replace(ON_RAY, run="ahead"),
    "gcs": GCS,
    "gcs_split": replace(GCS, run="split"),
    "gcs_ahead": replace(GCS, run="ahead"),
    "raylet": Ended("raylet of the controller's node", RAY, (3,), "raylet"),
    "rank": Ended("rank, without repairs", LOCAL, (3,), "rank "),
    "disk": Ended("disk full", LOCAL, (7,), "No space left on device", share=0.06),
}


def ended(name: str, kills: int, draw: random.Random, out: Path) -> Outcome:
    """Strike a run that saves every step so many times, start it again after each, and compare with one run."""
    kind = ENDED[name]
    outcome = Outcome(kind.struck, kind.run)
    keys = (kind.launcher, f"trainer.total_training_steps={3 * kills + 6}", "trainer.save_freq=1")
    keys = (*keys, "trainer.max_ckpt_to_keep=2", "trainer.save_best=false")
    with folder_of(name, out) as folder:
        last_step, struck_at = 0, 0.0
        for number in range(10 * kills + 1):  # a strike may miss a run that has just ended
            run = StruckRun(kind.run, folder, out / f"start_{number}.log", *keys)
            wanted = draw.randint(0, 3) if outcome.num_strikes < kills else 1_000_000
            run.wait_until(lambda run=run, wanted=wanted: len(run.family()) > 0 and len(run.steps()) >= min(wanted, 1))
            if struck_at and run.steps():
                outcome.seconds.append(time.monotonic() - struck_at)
                outcome.steps_lost.append(max(0, last_step - run.steps()[0] + 1))
                struck_at = 0.0
            run.wait_until(lambda run=run, wanted=wanted: len(run.steps()) >= wanted)
            pause(draw, 0.0, 1.5 if wanted else 8.0)
            before, at = run.is_over, time.monotonic()
            if before or not hit(name, run, folder, draw):
                if run.wait() == 0:
                    break
                continue
            outcome.num_strikes += 1
            code = run.wait()
            free(folder)
            last_step = max([last_step, *run.steps()])
            struck_at = struck_at or at
            outcome.ends[code] += 1
            text = run.text()
            if code not in kind.codes or "Traceback" in text or kind.names not in text:
                outcome.unsaid.append(f"code {code}, {run.log}: {text[-300:]!r}")
            outcome.left += run.left()
        if run.process.returncode != 0:
            raise RuntimeError(f"{run.log} did not end well:\n{run.text()[-3000:]}")
        compare(outcome, folder, out, *keys[:2], LOCAL)
    return outcome


def hit(name: str, run: StruckRun, folder: Path, draw: random.Random) -> bool:
    """Strike once; False where there was nothing to strike."""
    family = run.family()
    match name.partition("_")[0]:
        case "controller":
            chosen = [psutil.Process(run.process.pid)]
        case "gcs":
            chosen = named(family, "gcs_server")
        case "raylet":
            chosen = named(family, "raylet")
        case "rank":
            chosen = training_ranks(family)
        case _:
            fill(folder)
            return not run.is_over
    if chosen:
        strike(draw.choice(chosen))
    return bool(chosen)


def stopped(kills: int, draw: random.Random, out: Path) -> Outcome:
    """Stop the controller of a running run for STOPPED_S seconds, again and again: nothing may be lost."""
    outcome = Outcome(f"controller stopped for {STOPPED_S:g} s", "demo")
    steps = f"trainer.total_training_steps={3 * kills + 4}"
    run = StruckRun("demo", out / "hurt", out / "hurt.log", LOCAL, steps)
    for _ in range(kills):
        if not run.goes_on():
            break
        pause(draw, 0.0, 1.5)
        at, controller = time.monotonic(), psutil.Process(run.process.pid)
        strike(controller, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        strike(controller, signal.SIGCONT)
        outcome.num_strikes += 1
        if run.goes_on():
            outcome.seconds.append(time.monotonic() - at)
    run.succeed()
    outcome.left = run.left()
    compare(outcome, run.folder, out, LOCAL, steps)
    return outcome


def nodes(kills: int, draw: random.Random, out: Path) -> Outcome:
    """PP2 over two Ray nodes of a cluster: lose all processes of a node, or its raylet alone; another node joins."""
    sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("e2e", "dist")]
    from raylets import Raylets

    outcome = Outcome("node: all its processes, every third time its raylet alone", "demo")
    megatron = "actor_rollout_ref.actor.megatron"
    layout = (f"{megatron}.tensor_model_parallel_size=1", "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    steps = f"trainer.total_training_steps={3 * kills + 4}"
    with Raylets(1, 1) as cluster:
        keys = (RAY, *layout, steps, f"trainer.max_repairs={kills}")
        run = StruckRun("demo", out / "hurt", out / "hurt.log", *keys, variables=cluster.variables)
        last_node = 1
        for number in range(kills):
            if not run.goes_on(number):
                break
            pause(draw, 0.2, 3.0)
            node = next(node for node in range(last_node, 0, -1) if cluster.ranks(node))
            if number % 3 == 2:
                for raylet in named(cluster.family(node), "raylet"):
                    strike(raylet)
            else:
                cluster.kill(node)
            outcome.num_strikes += 1
            cluster.add_node(1)
            last_node += 1
        run.succeed()
        outcome.left = [*run.left(), *map(str, cluster.left_over().values())]
    outcome.note_repairs(run.folder)
    compare(outcome, run.folder, out, LOCAL, *layout[:1], "trainer.n_gpus_per_node=2", steps)
    return outcome


@contextmanager
def folder_of(name: str, out: Path) -> Iterator[Path]:
    """The folder of a struck run; for a full disk a small file system of its own. Raises PermissionError."""
    if name != "disk":
        yield out / "hurt"
        return
    mount = out / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        raise PermissionError("no file system may be mounted here")
    try:
        yield mount / "run"
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(folder: Path) -> None:
    """Take all that is left of the folder's file system."""
    with suppress(OSError), (folder.parent / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))


def free(folder: Path) -> None:
    """Give back what `fill` took."""
    (folder.parent / "filler").unlink(missing_ok=True)


KINDS = (*REPAIRED, *ENDED, "stopped", "nodes")
SHARES = {name: kind.share for name, kind in (REPAIRED | ENDED).items()} | {"stopped": 0.06, "nodes": 0.16}


def campaign(name: str, kills: int, seed: int, out: Path) -> Outcome:
    """All strikes of one kind. Raises RuntimeError where a run did not end well, with its output."""
    out.mkdir(parents=True)
    draw = random.Random(f"{seed} {name}")
    kills = max(1, round(kills * SHARES[name]))
    if name in REPAIRED:
        return repaired(REPAIRED[name], kills, draw, out)
    if name in ENDED:
        try:
            return ended(name, kills, draw, out)
        except PermissionError as error:
            return Outcome(ENDED[name].struck, ENDED[name].run, skipped=str(error))
    return (stopped if name == "stopped" else nodes)(kills, draw, out)


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of ranks in repairing runs; others in proportion")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, help="a new folder for the runs; default: a temporary one")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="campaign_"))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    files_of_stages = [sys.executable, "scripts/make_demo_preferences.py"]
    subprocess.run(files_of_stages, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    outcomes = []
    print(Outcome.HEADER, flush=True)
    for name in given.kinds:
        outcomes.append(campaign(name, given.kills, given.seed, out / name))
        print(outcomes[-1].row(), flush=True)
    if len(given.kinds) == len(KINDS):
        outcomes += [Outcome(struck, "", skipped=why) for struck, why in SKIPPED.items()]
        print("\n".join(outcome.row() for outcome in outcomes if outcome.struck in SKIPPED))
    for outcome in outcomes:
        for text in outcome.faults[:20]:
            print(f"  {outcome.struck}: {text}")
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
