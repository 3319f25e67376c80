"""GRPO steps of TRL's trainer in one process, each when a line comes in. `step.py` starts it, in TRL's environment.

    python scripts/bench/step_trl.py JOB

JOB: a JSON file, see `step.py`. Generation is TRL's own on transformers. A line of JSON says that it is ready, and one
for each step what it came to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

JOB = json.loads(Path(sys.argv[1]).read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print must not come between the lines
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def say(**told: object) -> None:
    print(json.dumps(told), file=ANSWERS, flush=True)


def share_of_digits(completions: list[str], **columns: object) -> list[float]:
    """The reward of `step_reward.py`."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


class Phases(GRPOTrainer):
    """Seconds of generating, and of all else."""

    seconds: dict[str, float] = {}
    tokens = 0

    def _generate(self, *args, **kwargs):
        start = time.perf_counter()
        generated = super()._generate(*args, **kwargs)
        self.seconds["gen"] = self.seconds.get("gen", 0.0) + time.perf_counter() - start
        return generated

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.tokens += int(output["completion_mask"].sum())
        self.seconds["gen and score"] = self.seconds.get("gen and score", 0.0) + time.perf_counter() - start
        return output


class OneByOne(TrainerCallback):
    """Waits for a line before every optimizer step."""

    trainer: Phases
    start = cpu_start = 0.0

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 0:
            say(ready=True)
        if not sys.stdin.readline():
            control.should_training_stop = True
            os._exit(0)
        self.trainer.seconds, self.trainer.tokens = {}, 0
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **others):
        seconds, phases = time.perf_counter() - self.start, self.trainer.seconds
        cpu_seconds = time.process_time() - self.cpu_start
        score = phases["gen and score"] - phases["gen"]
        told = {"gen": phases["gen"], "score": score, "update": seconds - phases["gen and score"]}
        say(seconds=seconds, cpu_seconds=cpu_seconds, tokens=self.trainer.tokens, phases=told)


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    samples, passes = JOB["prompts"] * JOB["n"], JOB["passes"]
    config = GRPOConfig(
        output_dir=JOB["folder"],
        max_steps=JOB["steps"],
        per_device_train_batch_size=samples // passes,
        gradient_accumulation_steps=passes,
        num_generations=JOB["n"],
        max_completion_length=JOB["response"],
        temperature=1.0,
        shuffle_dataset=False,
        beta=JOB["kl_coef"],
        learning_rate=JOB["lr"],
        lr_scheduler_type="constant",
        weight_decay=JOB["weight_decay"],
        max_grad_norm=1.0,
        loss_type="dapo",
        use_cpu=True,
        seed=1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **JOB["settings"],
    )
    gate = OneByOne()
    gate.trainer = Phases(
        model=AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in JOB["questions"]]),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"], padding_side="left"),
        callbacks=[gate],
    )
    gate.trainer.train()


if __name__ == "__main__":
    main()
