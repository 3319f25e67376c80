"""Is what `megatron-rl plan --stage` says of a step's seconds right? Each stage in several layouts, planned and run.

    python scripts/bench/stage_time.py --hardware FILE.yaml [--alone FILE.yaml] [--variants sft reward dpo] [--rounds 2]

FILE.yaml: of `megatron-rl profile --ranks 2` (or more) on this machine; --alone: of `--ranks 1`, for the layout of one
process, whose threads are all cores. Without it that layout is planned with FILE.yaml, whose rank has fewer threads.
Runs are those of the command line, through Ray, in rounds over all; of each the first step does not count. The model is
the small one of `step.py`, the lengths the ragged ones of `sft_step.py`; a pair is a prompt and two answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from sft_step import LETTERS, LONGEST, PROMPT_SHARE, SHAPES, write_examples
from step import LR, REPOSITORY, SIZES, make_model, spread

EXAMPLES = {"sft": 16, "reward": 8, "dpo": 8}
"""Examples of a step; two answers each where they are compared."""
LAYOUTS = {"one process": (1, 1, 1), "TP2": (2, 2, 1), "PP2": (2, 1, 2), "DP2": (2, 1, 1)}
"""(ranks, TP, PP)."""
VARIANTS: dict[str, tuple[str, dict]] = {
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "dpo-on-the-fly": ("dpo", {"dpo": {"reference": "on_the_fly"}}),
    "kto-on-the-fly": ("dpo", {"dpo": {"loss": "kto", "reference": "on_the_fly"}}),
}
"""Name -> (stage, keys)."""


@dataclass(frozen=True)
class Case:
    """A stage in a layout."""

    variant: str
    layout: str

    @property
    def stage(self) -> str:
        return VARIANTS[self.variant][0]

    @property
    def is_labelled(self) -> bool:
        return "kto" in self.variant

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.layout}"

    def config(self, folder: Path, steps: int) -> dict:
        """The configuration that `megatron-rl` would read."""
        num_ranks, tp, pp = LAYOUTS[self.layout]
        kind = "labelled" if self.is_labelled else {"sft": "examples"}.get(self.stage, "pairs")
        trained = {
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 1024,
            "optim": {"lr": LR},
        }
        megatron = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        return VARIANTS[self.variant][1] | {
            "data": {
                "train_files": str(folder / f"{kind}.jsonl"),
                "val_files": str(folder / f"{kind}_held_out.jsonl"),
                "train_batch_size": EXAMPLES[self.stage] * (2 if self.is_labelled else 1),
                "max_length": LONGEST,
            },
            "actor_rollout_ref": {
                "model": {"path": str(folder / "model")},
                "actor": trained | {"megatron": megatron},
            },
            "critic": trained,
            "trainer": {
                "stage": self.stage,
                "device": "cpu",
                "n_gpus_per_node": num_ranks,
                "total_training_steps": steps,
                "test_freq": 0,
                "val_before_train": False,
                "logger": ["jsonl"],
                "export_hf": False,
            },
        }


def write_answers(num_prompts: int, folder: Path, suffix: str) -> float:
    """Pairs, and the same answers labelled; mean tokens of a sequence."""
    draw, lengths = random.Random(2), []
    pairs, labelled = folder / f"pairs{suffix}.jsonl", folder / f"labelled{suffix}.jsonl"
    with pairs.open("w") as of_pairs, labelled.open("w") as of_labels:
        for number, length in enumerate(SHAPES["ragged"].lengths(num_prompts)):
            length = min(length, LONGEST - 8)  # the labelled ones have a number before their prompt
            prompt = "".join(draw.choices(LETTERS, k=max(1, round(PROMPT_SHARE * length))))
            size = max(1, length - len(prompt) - 1)
            answers = ["".join(draw.choices(LETTERS, k=size)) for _ in range(2)]
            lengths += [len(prompt) + size + 1] * 2
            of_pairs.write(json.dumps({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}) + "\n")
            for answer in answers:
                row = {"prompt": f"{number} {prompt}", "completion": answer, "label": answer == answers[0]}
                of_labels.write(json.dumps(row) + "\n")
    return statistics.mean(lengths)


def command(*arguments: str, folder: Path) -> str:
    """What the command line prints. Raises SystemExit with its end where it fails."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", *arguments], capture_output=True, text=True, env=environment, cwd=folder
    )
    if done.returncode:
        raise SystemExit(f"megatron-rl {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def planned(file: Path, length: float, hardware: Path, folder: Path) -> dict[str, float]:
    """Phase -> seconds of a step, and the whole step's."""
    arguments = ["--config", str(file), "--hardware", str(hardware), "--response-length", str(length), "--json"]
    time = json.loads(command("plan", *arguments, folder=folder))["plan"]["time"]
    return time["seconds"] | {"step": time["step_seconds"]}


def measured(case: Case, file: Path, place: Path, folder: Path) -> list[dict[str, float]]:
    """Seconds of each step but the first."""
    command(case.stage, "--config", str(file), f"trainer.default_local_dir={place}", folder=folder)
    steps = []
    for line in (place / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        steps.append(
            {name.removeprefix("timing_s/"): metrics[name] for name in metrics if name.startswith("timing_s/")}
        )
    return [step for step in steps if "step" in step][1:]


def report(case: Case, plan: dict[str, float], steps: Sequence[dict[str, float]]) -> None:
    """One line for each phase."""
    for phase, seconds in plan.items():
        found = [step[phase] for step in steps if phase in step]
        if found:
            ratio = seconds / statistics.median(found)
            print(
                f"{case.name:28} {phase:14} planned {seconds:7.3f} s, measured {spread(found)} s: {ratio:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path, required=True, help="of `megatron-rl profile`")
    parser.add_argument("--alone", type=Path, help="the same with --ranks 1")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["sft", "reward", "dpo"])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=4, help="of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    cases = [Case(variant, layout) for variant in options.variants for layout in options.layouts]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(SIZES["small"], folder / "model")
        shape, number = SHAPES["ragged"], max(EXAMPLES.values()) * options.steps
        write_examples(shape, number, folder / "examples.jsonl")
        write_examples(shape, 4, folder / "examples_held_out.jsonl")
        of_answers = write_answers(number, folder, "")
        write_answers(4, folder, "_held_out")
        lengths = {"sft": statistics.mean(shape.lengths(number)), "reward": of_answers, "dpo": of_answers}
        plans: dict[str, dict] = {}
        steps: dict[str, list[dict]] = {case.name: [] for case in cases}
        files = {}
        for case in cases:
            files[case.name] = folder / f"{case.name.replace(' ', '_')}.yaml"
            files[case.name].write_text(yaml.safe_dump(case.config(folder, options.steps)))
            alone = options.alone if case.layout == "one process" else None
            hardware = (alone or options.hardware).resolve()
            plans[case.name] = planned(files[case.name], lengths[case.stage], hardware, folder)
        for turn in range(options.rounds):
            for case in cases:
                run = folder / f"{case.name.replace(' ', '_')}_{turn}"
                steps[case.name] += measured(case, files[case.name], run, folder)
                if turn == options.rounds - 1:
                    report(case, plans[case.name], steps[case.name])
    if options.json:
        options.json.write_text(json.dumps({"planned": plans, "measured": steps}, indent=1))


if __name__ == "__main__":
    main()
