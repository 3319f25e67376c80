"""The commands of `megatron-rl`, in the order and in the groups that `--help` shows, with an example of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.cli.checking import check_cluster_command, doctor_command
from megatron_rl.cli.datasets import dataset_command
from megatron_rl.cli.evaluating import eval_command, generate_command
from megatron_rl.cli.families import families_command, features_command
from megatron_rl.cli.models import average_command, export_command
from megatron_rl.cli.planning import columns_command, map_command, plan_command, profile_command
from megatron_rl.cli.porting import port_command
from megatron_rl.cli.rehearsing import rehearse_command
from megatron_rl.cli.serving import serve_command
from megatron_rl.cli.starting import init_command
from megatron_rl.cli.tasks import dpo_command, reward_command, sft_command, train_command
from megatron_rl.cli.trials import ablate_command, nightly_command
from megatron_rl.cli.viewing import explain_command, view_command

START, TRAIN = "Start", "Train"
BEFORE, AFTER = "Before a run: will it work, and how long?", "After a run: what did it learn?"
LARGE, SEVERAL, REFERENCE = "Plan large runs", "Several runs", "Reference"
RUNS = ("train", "sft", "reward", "dpo")
"""Commands that start a run."""
DEMO = "--config configs/demo_cpu.yaml"


@dataclass(frozen=True)
class Command:
    """One command. panel: its group in `--help`. example: its arguments. other_names: further ones, not listed."""

    name: str
    function: Callable[..., None]
    panel: str
    example: str
    other_names: tuple[str, ...] = ()


COMMANDS = (
    Command("init", init_command, START, "my_run --model tiny --kind score --gpus 0"),
    Command("dataset", dataset_command, START, "--from questions.jsonl --out train.parquet"),
    Command("port", port_command, START, "run_qwen3-8b.sh --out my.yaml"),
    Command("doctor", doctor_command, START, ""),
    Command("train", train_command, TRAIN, f"{DEMO} --local --collapse trainer.total_training_steps=5"),
    Command("sft", sft_command, TRAIN, "--config configs/stages/sft_cpu.yaml data.train_batch_size=32"),
    Command("reward", reward_command, TRAIN, "--config configs/stages/reward_cpu.yaml"),
    Command("dpo", dpo_command, TRAIN, "--config my_run.yaml dpo.loss=ipo"),
    Command("serve", serve_command, TRAIN, f"{DEMO} --keys my_keys"),
    Command("plan", plan_command, BEFORE, f"{DEMO} --hardware h100"),
    Command("check-cluster", check_cluster_command, BEFORE, f"{DEMO} trainer.nnodes=2"),
    Command("view", view_command, AFTER, "outputs/demo"),
    Command("explain", explain_command, AFTER, "outputs/demo --step 1"),
    Command("eval", eval_command, AFTER, f"{DEMO} --model outputs/demo --out outputs/eval --samples 4"),
    Command("generate", generate_command, AFTER, f"{DEMO} --model outputs/demo --out outputs/answers"),
    Command("export", export_command, AFTER, "--checkpoint outputs/my_run --target my_model"),
    Command("average", average_command, AFTER, "--checkpoints outputs/my_run --target mean"),
    Command("map", map_command, LARGE, f"{DEMO} --gpus 4", ("search-layout",)),
    Command("rehearse", rehearse_command, LARGE, f"{DEMO} --ranks 0", ("dry-run",)),
    Command("profile", profile_command, LARGE, "--hardware-file outputs/hardware.yaml"),
    Command("ablate", ablate_command, SEVERAL, "--config configs/ablation.yaml --dry-run"),
    Command("nightly", nightly_command, SEVERAL, f"{DEMO} --folder outputs/nightly"),
    Command("columns", columns_command, REFERENCE, ""),
    Command("families", families_command, REFERENCE, ""),
    Command("features", features_command, REFERENCE, ""),
)
