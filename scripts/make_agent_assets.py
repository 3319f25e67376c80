"""Make the agent demos: prompts as parquet files, and a tiny model that learned from a noisy teacher's transcripts.

    python scripts/make_agent_assets.py guess --output assets/guess --seed 0

    assets/guess/train.parquet   tasks in verl's row schema; the number is the ground truth
    assets/guess/test.parquet    others
    assets/guess/model/          Hugging Face folder: character tokenizer and a 4-layer Qwen2
    assets/guess/assets.json     seed and format version; written last, so it marks a finished folder

guess       a number from 0 to 15 in five turns. The teacher mostly guesses anything, and seldom the middle.
calculator  sums of four digits through a tool call. The teacher rarely calls, and else answers anything.

The model learns with `megatron-rl sft` (configs/stages/agent_model_cpu.yaml). Reinforcement learning in the environment
(scripts/demo_environments.py), or with the tool (scripts/demo_tools.py), does the rest within minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from make_demo_assets import MARKER, finished, make_model, make_tokenizer, replace_or_exit, write_parquet

FORMAT_VERSION = 1
STAGE = Path(__file__).resolve().parents[1] / "configs/stages/agent_model_cpu.yaml"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""A turn of the policy ends with the end token; what it reads stands between turns as it is."""
ANYTHING, CALLS = 0.85, 0.35
"""Shares of the teacher's transcripts: with guesses of any number, and with a call of the calculator."""
NUM_GUESSES = 5

Message = dict[str, str]


def guess_task(draw: random.Random) -> tuple[str, str]:
    """(prompt, ground truth): a number from 0 to 15."""
    return "0-15?", str(draw.randrange(16))


def guess_transcript(prompt: str, truth: str, draw: random.Random) -> list[Message]:
    """Guesses of the teacher until the number, or five: the middle of what is left, or anything."""
    messages, low, high = [{"role": "user", "content": prompt}], 0, 15
    guesses_anything = draw.random() < ANYTHING
    for _ in range(NUM_GUESSES):
        guess = draw.randint(0, 15) if guesses_anything else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == int(truth):
            break
        low, high = (max(low, guess + 1), high) if guess < int(truth) else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": ">" if guess < int(truth) else "<"})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def calculator_task(draw: random.Random) -> tuple[str, str]:
    """(prompt, ground truth): a sum of four digits."""
    a, b = draw.randrange(10_000), draw.randrange(10_000)
    return f"{a:04d}+{b:04d}=", f"{a + b:05d}"


def calculator_transcript(prompt: str, truth: str, draw: random.Random) -> list[Message]:
    """A call and its answer, or any number."""
    asked = {"role": "user", "content": prompt}
    if draw.random() >= CALLS:
        return [asked, {"role": "assistant", "content": f"{draw.randrange(20_000):05d}"}]
    called = f'[add(terms="{prompt[:-1]}")]'
    call, answer = ({"role": "assistant", "content": text} for text in (called, truth))
    return [asked, call, {"role": "tool", "content": truth}, answer]


@dataclass(frozen=True)
class Task:
    """How tasks are drawn, and what the teacher says."""

    task: Callable[[random.Random], tuple[str, str]]
    transcript: Callable[[str, str, random.Random], list[Message]]


TASKS = {"guess": Task(guess_task, guess_transcript), "calculator": Task(calculator_task, calculator_transcript)}


def rows(name: str, split: str, number: int, seed: int) -> list[dict]:
    """Tasks in verl's row schema."""
    draw = random.Random(f"{name},{split},{seed}")
    tasks = [TASKS[name].task(draw) for _ in range(number)]
    return [
        {
            "data_source": f"demo/{name}",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, truth) in enumerate(tasks)
    ]


def transcripts(name: str, number: int, seed: int) -> list[dict]:
    """What the teacher said."""
    draw = random.Random(f"{name},transcripts,{seed}")
    tasks = (TASKS[name].task(draw) for _ in range(number))
    return [{"messages": TASKS[name].transcript(prompt, truth, draw)} for prompt, truth in tasks]


def tune(name: str, folder: Path, seed: int) -> Path:
    """Teach an untrained model the transcripts with `megatron-rl sft`; returns the tuned model's folder."""
    import torch
    import yaml
    from transformers.utils import logging

    logging.disable_progress_bar()
    stage = yaml.safe_load(STAGE.read_text())
    number = stage["trainer"]["total_training_steps"] * stage["data"]["train_batch_size"]
    write_parquet(transcripts(name, number, seed), folder / "lessons.parquet")
    write_parquet(transcripts(name, 256, seed + 1), folder / "held_out.parquet")
    torch.manual_seed(seed)
    make_model().save_pretrained(folder / "untrained")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "untrained")
    overrides = {
        "data.train_files": folder / "lessons.parquet",
        "data.val_files": folder / "held_out.parquet",
        "actor_rollout_ref.model.path": folder / "untrained",
        "trainer.default_local_dir": folder / "stage",
    }
    command = [sys.executable, "-m", "megatron_rl", "sft", "--local", "--config", str(STAGE)]
    subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
    return folder / "stage" / "hf_model"


def build(name: str, folder: Path, seed: int) -> dict:
    """Fill `folder` with all assets and return what `assets.json` says."""
    write_parquet(rows(name, "train", 4096, seed), folder / "train.parquet")
    write_parquet(rows(name, "test", 256, seed), folder / "test.parquet")
    with tempfile.TemporaryDirectory(dir=folder, prefix="tuning-") as work:
        shutil.move(tune(name, Path(work), seed), folder / "model")
    facts = {"format_version": FORMAT_VERSION, "seed": seed}
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the assets unless they are finished. Exits with 2 rather than replace a folder not its own."""
    parser = argparse.ArgumentParser(description="Make an agent demo: tasks and a tuned model.")
    parser.add_argument("task", choices=TASKS, help="which demo")
    parser.add_argument("--output", type=Path, default=None, help="folder to make; default: assets/TASK")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks, the model and its training")
    args = parser.parse_args(arguments)

    output = args.output or Path("assets") / args.task
    if finished(output, MARKER, args.seed, FORMAT_VERSION) is not None:
        print(f"{output} is ready")
        return
    started = time.monotonic()
    replace_or_exit(parser, output, lambda folder: build(args.task, folder, args.seed))
    print(f"{output} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
