"""Files of sums and of what prefers the right ones, and what a run of each stage on them is told."""

from __future__ import annotations

import json
import random
from pathlib import Path

from command_line import CommandLine
from recorded_runs import RecordedRun
from safetensors.torch import load_file

SHORT = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
    "trainer.test_freq=2",
    "trainer.total_training_steps=5",
    "trainer.save_freq=2",
)
STAGES = {"sft": "sft", "reward": "pairs", "dpo": "pairs", "dpo on the fly": "pairs", "kto": "labels"}
STAGES |= {"dpo that follows": "pairs"}
"""What is run -> the files that it reads."""
FOLLOWS = tuple(f"actor_rollout_ref.ref.{key}" for key in ("sync_ref_model=true", "ref_model_sync_steps=2"))
KEYS = {
    "dpo on the fly": ("dpo.reference=on_the_fly",),
    "dpo that follows": ("dpo.reference=on_the_fly", "dpo.loss=[apo_zero,sft]", "dpo.loss_weights=[1.0,0.2]", *FOLLOWS),
    "kto": ("dpo.loss=kto",),
}


def write_files(folder: Path) -> Path:
    """For each kind 50 rows to learn from and 12 held-out ones, as JSON lines; returns the folder."""
    draw = random.Random(0)
    for split, count in (("train", 50), ("val", 12)):
        rows: dict[str, list[dict]] = {"sft": [], "pairs": [], "labels": []}
        for number in range(count):
            left, right = draw.randint(10, 99), draw.randint(10, 99)
            prompt, answer, other = f"{left}+{right}=", str(left + right), str(left + right + draw.choice((1, 10)))
            rows["sft"].append({"prompt": prompt, "response": answer})
            rows["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": other})
            is_right = number % 2 == 0
            rows["labels"].append({"prompt": prompt, "completion": answer if is_right else other, "label": is_right})
        for name, lines in rows.items():
            (folder / f"{name}_{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def keys_of(files: Path, stage: str) -> tuple[str, ...]:
    """What a run of a stage is told beside its layout."""
    data = [f"data.{split}_files={files / STAGES[stage]}_{split}.jsonl" for split in ("train", "val")]
    return (*SHORT, *data, *KEYS.get(stage, ()))


def command_of(stage: str) -> str:
    """The command that runs it."""
    return {"dpo on the fly": "dpo", "dpo that follows": "dpo", "kto": "dpo"}.get(stage, stage)


def weights_apart(run: CommandLine | RecordedRun, other: CommandLine | RecordedRun) -> float:
    """Of the exported models the mean difference of the tensor with most.

    Without biases of keys: attention does not depend on them, so Adam makes full steps of their rounding noise.
    """
    ours, theirs = (load_file(one.run / "hf_model/model.safetensors") for one in (run, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().mean()) for key in ours if not key.endswith("k_proj.bias"))
