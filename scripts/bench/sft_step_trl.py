"""SFT steps of TRL's trainer in one process, each when a line comes in. `sft_step.py` starts it, in TRL's environment.

    python scripts/bench/sft_step_trl.py JOB

JOB: a JSON file, see `sft_step.py`. A line of JSON says that it is ready, and one for each step what it came to.
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
from trl import SFTConfig, SFTTrainer  # noqa: E402


def say(**told: object) -> None:
    print(json.dumps(told), file=ANSWERS, flush=True)


class Told(SFTTrainer):
    """The loss and the tokens of a step, over its passes."""

    loss = tokens = 0.0

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.loss += float(loss.detach())
        self.tokens += inputs["input_ids"].numel()
        return loss


class OneByOne(TrainerCallback):
    """Waits for a line before every optimizer step. Its batches are already made then."""

    trainer: Told
    start = cpu_start = 0.0

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 0:
            say(ready=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.trainer.loss = self.trainer.tokens = 0.0
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **others):
        seconds, cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu_start
        say(seconds=seconds, cpu_seconds=cpu_seconds, tokens=self.trainer.tokens, loss=self.trainer.loss)


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    config = SFTConfig(
        output_dir=JOB["folder"],
        max_steps=JOB["steps"],
        per_device_train_batch_size=JOB["rows"],
        gradient_accumulation_steps=JOB["batch"] // JOB["rows"],
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        learning_rate=JOB["lr"],
        lr_scheduler_type="constant",
        weight_decay=JOB["weight_decay"],
        max_grad_norm=1.0,
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
    gate.trainer = Told(
        model=AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(JOB["examples"]),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"]),
        callbacks=[gate],
    )
    gate.trainer.train()


if __name__ == "__main__":
    main()
