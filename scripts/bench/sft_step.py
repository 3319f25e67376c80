"""A step of supervised fine-tuning beside one of TRL's SFTTrainer: the same weights, batches, optimizer and threads.

    python scripts/bench/sft_step.py [--trl-python PYTHON] [--shapes equal ragged] [--rounds 7] [--arms local trl ...]

PYTHON belongs to an environment of its own, with TRL in it, as for `step.py`, whose model this takes; without one the
commands that make it are printed. Every arm is a process that keeps its trainer in memory and takes a step when it is
told to, so that rounds interleave and only one arm works at a time. All arms learn from the same tokens in the same
order; where the loss of a step differs between them by more than 1e-4 of it the bench ends with an error.

    local, ray        this package, in one process and through Ray, blocks by tokens (`--max-tokens`)
    trl               TRL as it comes: examples of a pass are filled up to its longest
    trl_padding_free  TRL with padding_free: examples of a pass lie end to end

Seconds are medians over the rounds, with the lowest and the highest; ratios are medians of the ratios of each round.
CPU seconds, of all threads of a process, stay comparable where the machine has other work, best with --threads 1; of
the arm `ray`, whose rank has a thread for each core, they are not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml
from step import HERE, LR, REPOSITORY, SIZES, TRL, TRL_SETTINGS, WEIGHT_DECAY, Arm, make_model, spread

OURS = ("local", "ray")
PROMPT_SHARE, LONGEST = 0.25, 512
"""The prompt's share of an example's tokens; tokens of the longest example."""
THEIRS: dict[str, dict] = {
    "trl": {"max_length": LONGEST},
    "trl_padding_free": {"padding_free": True, "max_length": None},
}
"""Arm -> fields of SFTConfig."""
TOLERANCE = 1e-4
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Shape:
    """Lengths of examples in tokens: log-normal with a median, cut off at 16 and `LONGEST`; of spread 0 all equal."""

    name: str
    median: int
    spread: float

    def lengths(self, number: int, seed: int = 0) -> Iterator[int]:
        draw = random.Random(seed)
        for _ in range(number):
            yield max(16, min(LONGEST, round(self.median * math.exp(self.spread * draw.gauss(0, 1)))))


SHAPES = {shape.name: shape for shape in (Shape("equal", 256, 0.0), Shape("ragged", 96, 0.9))}
"""The ragged one has the spread of collections of instructions: means a third above their medians, a long tail."""


def write_examples(shape: Shape, number: int, path: Path) -> None:
    """Prompts and completions of random characters, each a token; an end token is put behind the completion."""
    draw = random.Random(1)
    with path.open("w") as file:
        for length in shape.lengths(number):
            prompt = max(1, round(PROMPT_SHARE * length))
            text = "".join(draw.choices(LETTERS, k=length - 1))
            file.write(json.dumps({"prompt": text[:prompt], "completion": text[prompt:]}) + "\n")


def our_config(folder: Path, steps: int, examples: int, max_tokens: int) -> dict:
    """The configuration that `megatron-rl sft` would read."""
    files = str(folder / "examples.jsonl")
    return {
        "data": {
            "train_files": files,
            "val_files": files,
            "train_batch_size": examples,
            "max_length": LONGEST,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": max_tokens,
                "optim": {"lr": LR, "weight_decay": WEIGHT_DECAY},
            },
        },
        "trainer": {
            "stage": "sft",
            "device": "cpu",
            "n_gpus_per_node": 1,
            "total_training_steps": steps,
            "test_freq": 0,
            "val_before_train": False,
            "logger": ["jsonl"],
            "export_hf": False,
        },
    }


def tokens_of(folder: Path) -> list[dict[str, list[int]]]:
    """The examples as this package reads them: tokens, and 1 where one counts."""
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.data.reading import read_examples
    from megatron_rl.data.reading_options import ReadingOptions

    options = ReadingOptions(max_length=LONGEST)
    examples, _ = read_examples([str(folder / "examples.jsonl")], ModelFolder(folder / "model").tokenizer, options)
    return [{"input_ids": one.tokens.tolist(), "completion_mask": one.loss_mask.int().tolist()} for one in examples]


def command_of(arm: str, folder: Path, steps: int, options) -> list[str]:
    """How an arm is started; its files are in `folder`."""
    if arm in OURS:
        config = folder / f"{arm}.yaml"
        config.write_text(yaml.safe_dump(our_config(folder, steps, options.examples, options.max_tokens)))
        overrides = [f"trainer.default_local_dir={folder / arm}", *options.ours]
        return [sys.executable, str(HERE / "step_ours.py"), str(config), arm, *overrides]
    job = {
        "model": str(folder / "model"),
        "folder": str(folder / arm),
        "examples": tokens_of(folder),
        "threads": options.threads,
        "steps": steps,
        "batch": options.examples,
        "rows": options.trl_rows,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "settings": TRL_SETTINGS | THEIRS[arm] | json.loads(options.trl_settings),
    }
    file = folder / f"{arm}.json"
    file.write_text(json.dumps(job))
    return [str(options.trl_python), str(HERE / "sft_step_trl.py"), str(file)]


def check_losses(losses: Mapping[str, float]) -> None:
    """Raises SystemExit where the arms' losses of one step are not the same."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > TOLERANCE * low:
        raise SystemExit(f"the arms learn something else: losses of one step are {losses}")


def report(taken: Mapping[str, list[dict]]) -> dict:
    """Print what the rounds came to; the same for a file."""
    kinds, said = ("seconds", "cpu_seconds"), dict[str, dict]()
    for arm, steps in taken.items():
        said[arm] = {kind: [step[kind] for step in steps] for kind in kinds}
        said[arm]["tokens"] = [step["tokens"] for step in steps]
        print(f"  {arm:16} {spread(said[arm]['seconds'])} s; CPU {spread(said[arm]['cpu_seconds'])} s")
    for ours in [arm for arm in taken if arm in OURS]:
        for theirs in [arm for arm in taken if arm in THEIRS]:
            for kind in kinds if ours != "ray" else kinds[:1]:
                ratios = [one / other for one, other in zip(said[theirs][kind], said[ours][kind], strict=True)]
                said[ours][f"{theirs} / {ours}, {kind}"] = ratios
                print(f"  {theirs} / {ours}, {kind.replace('_', ' ')}: {spread(ratios)}")
    return said


def filled_up(lengths: Sequence[int], rows: int) -> float:
    """Tokens of passes of so many rows, each filled up to its longest, for each token that there is."""
    passes = [lengths[first : first + rows] for first in range(0, len(lengths), rows)]
    return sum(len(one) * max(one) for one in passes) / sum(lengths)


def measure(shape: Shape, options) -> dict:
    """Interleaved rounds of all arms, each round in the other order than the one before."""
    rounds = options.rounds + options.warm_up
    with tempfile.TemporaryDirectory() as place, ExitStack() as opened:
        folder = Path(place)
        num_params = make_model(SIZES["small"], folder / "model")
        number = options.examples * (rounds + 1)  # the last step of a run, which would validate, is not taken
        write_examples(shape, number, folder / "examples.jsonl")
        lengths = list(shape.lengths(number))
        print(
            f"{shape.name}: {num_params / 1e6:.1f}M parameters, {options.examples} examples a step of "
            f"{statistics.mean(lengths):.0f} tokens in the mean, {max(lengths)} at most; filled up, passes of "
            f"{options.trl_rows} have {filled_up(lengths, options.trl_rows):.2f} times as many tokens",
            flush=True,
        )
        arms = []
        for name in options.arms:
            arm = Arm(name, command_of(name, folder, rounds + 1, options), folder, options.threads, REPOSITORY)
            opened.callback(arm.close)
            arms.append(arm)
        taken: dict[str, list[dict]] = {arm.name: [] for arm in arms}
        for number in range(rounds):
            steps = {arm.name: arm.step() for arm in (arms if number % 2 == 0 else arms[::-1])}
            check_losses({name: step["loss"] for name, step in steps.items()})
            if number >= options.warm_up:
                for name, step in steps.items():
                    taken[name].append(step)
        return report(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="the interpreter of TRL's environment")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=[*OURS, *THEIRS], default=["local", *THEIRS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those")
    parser.add_argument("--examples", type=int, default=32, help="of a step; a multiple of --trl-rows")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a pass of this package")
    parser.add_argument("--ours", nargs="*", default=[], help="dotted overrides of this package's configuration")
    parser.add_argument("--trl-rows", type=int, default=8, help="examples of a pass of TRL's; 8 is its default")
    parser.add_argument("--trl-settings", default="{}", help="JSON: further fields of its SFTConfig")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.trl_python is None and set(options.arms) & set(THEIRS):
        folder = Path(tempfile.gettempdir()) / "trl_venv"
        python = folder / "bin" / "python"
        parser.exit(2, f"{sys.executable} -m venv {folder} && {python} -m pip install {' '.join(TRL)}\n")
    found = {name: measure(SHAPES[name], options) for name in options.shapes}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
