"""The end of a run: export, parity of the exported model, curves, summary and the before/after table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.checkpoint.hf_folder import removing_unfinished
from megatron_rl.checkpoint.storage import storing
from megatron_rl.config.roles import ACTOR, Placement
from megatron_rl.errors import ParityError
from megatron_rl.observe.curves import plot_curves
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.summary import before_after_table, write_summary
from megatron_rl.observe.timeline import plot_timeline
from megatron_rl.records import Sequences

if TYPE_CHECKING:
    from megatron_rl.controller.run import Run
    from megatron_rl.controller.run_logger import RunLogger

EXPORT_LOGIT_BOUND, EXPORT_LOGIT_SHARE = 1e-4, 1e-5
"""Largest allowed difference between the exported model's logits and the trainer's, in float32: the larger one of this
number and this share of the largest logit, which rounding grows with.
"""


def finish_run(run: Run) -> dict[str, Any]:
    """Write everything a user takes home from a run; returns the summary. Raises ParityError, StorageError."""
    if run.validation.parity_rows is None:  # every step had been taken before
        run.validation.run(run.config.trainer.num_steps)
    run.logger.keep_folder()
    export_diff = export_and_compare(run) if run.config.trainer.export_hf else None
    summary = summarise(run, export_diff)
    with storing("summary.json", run.logger.folder.path):
        write_summary(run.logger.folder.path / "summary.json", summary)
    if "jsonl" in run.config.trainer.logger:
        draw(run.logger)
    draw_steps(run.logger)
    names = {"held-out accuracy": "val_accuracy"} | (
        {"held-out reward": "val_reward"} if run.roles.reward_models else {}
    )
    rows = [(name, summary[f"{key}_before"], summary[f"{key}_after"]) for name, key in names.items()]
    rows = [row for row in rows if None not in row]
    if rows:
        run.logger.console.print(before_after_table(rows))
    files = sorted(path.name for path in run.logger.folder.path.iterdir() if not path.name.startswith("."))
    run.logger.say(f"written to {run.logger.folder.path}: {', '.join(files)}")
    return summary


def draw(logger: RunLogger) -> None:
    """Curves of the whole run; a picture that cannot be written is no reason to end without a summary."""
    try:
        plot_curves(logger.folder.path / METRICS_FILE, logger.folder.path / "curves.png")
    except OSError as error:
        logger.warn(f"curves.png could not be written: {error}")


def draw_steps(logger: RunLogger) -> None:
    """The timeline of the last steps, one lane for each pool, as a picture and as numbers. Warns as `draw` does."""
    ran, folder = logger.clock.recent, logger.folder.path
    try:
        (folder / "timeline.json").write_text(json.dumps([asdict(one) for one in ran], indent=1) + "\n")
        plot_timeline(ran, folder / "timeline.png")
    except OSError as error:
        logger.warn(f"the timeline could not be written: {error}")


def summarise(run: Run, export_diff: float | None) -> dict[str, Any]:
    """The run in a dozen numbers; bytes are per rank, in rank order, of the last transition to rollout mode.

    Without a rule there is no accuracy, only a reward.
    """
    config = run.config
    trainer, placement = config.trainer, Placement.of(config)
    pool = placement.pool_of(ACTOR)
    tp_size, pp_size = pool.layout.tensor_model_parallel_size, pool.layout.pipeline_model_parallel_size
    return {
        **before_and_after("val_accuracy", run.logger.accuracies, trainer.val_before_train),
        **before_and_after("val_reward", run.logger.val_rewards, trainer.val_before_train),
        "steps": trainer.num_steps,
        "wall_s": round(time.monotonic() - run.started, 1),
        "layout": {
            "world_size": placement.world_size,
            "tp": tp_size,
            "pp": pp_size,
            "cp": pool.layout.context_parallel_size,
            "dp": pool.world_size // (tp_size * pp_size * pool.layout.context_parallel_size),
            "rollout_tp": config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        },
        "pools": {name: [role.name for role in one.roles] for name, one in placement.pools.items()},
        "seed": trainer.seed,
        "skipped_updates": run.logger.updates.totals,
        "rollout_logprob_diff_max": run.algorithm.logprob_diff_max,
        "hf_export_logit_diff_max": export_diff,
        "transition_bytes_received_per_rank": [report.bytes_received for report in run.logger.transitions],
        "transition_bytes_lower_bound_per_rank": [report.lower_bound_bytes for report in run.logger.transitions],
        "transition_network_bytes_per_rank": [report.network_bytes for report in run.logger.transitions],
        "transition_network_bytes_lower_bound_per_rank": [
            report.network_bound_bytes for report in run.logger.transitions
        ],
    }


def before_and_after(name: str, validations: list[float], val_before_train: bool) -> dict[str, float | None]:
    """The first and the last of all validations, where there are such."""
    first = validations[0] if validations and val_before_train else None
    return {f"{name}_before": first, f"{name}_after": validations[-1] if validations else None}


def export_and_compare(run: Run) -> float:
    """Export the actor; largest logit difference to the trainer on held-out answers, 0 where those have no token.

    Raises ParityError when a float32 model differs by more than `export_bound`, StorageError when it cannot be written,
    and then nothing of it is left.
    """
    target, rows = run.logger.folder.path / "hf_model", run.validation.parity_rows
    if rows is None:
        raise ValueError("nothing was validated: there are no rows to compare the export on")
    with run.logger.clock.phase("export"):
        with removing_unfinished(target), storing(target.name, run.logger.folder.path):
            run.roles.actor.export_hf(target.resolve()).get()
        answers: Any = run.roles.actor.response_logits(rows).get()  # no records, so one of each data-parallel rank
        trainer_logits = torch.cat(answers)
    differences = (hf_response_logits(target, rows) - trainer_logits).abs()
    largest = float(differences.max()) if differences.numel() else 0.0
    bound = export_bound(trainer_logits)
    if run.config.actor_rollout_ref.actor.megatron.dtype == "float32" and not largest <= bound:
        raise ParityError(
            f"logits of the exported model in {target} differ from the trainer's by {largest:.3g}; "
            f"the bound is {bound:.2g}"
        )
    return largest


def export_bound(logits: torch.Tensor) -> float:
    """How far an export's logits may be from these, the trainer's, float32 of any shape."""
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    return max(EXPORT_LOGIT_BOUND, EXPORT_LOGIT_SHARE * largest)


def hf_model(folder: Path | str) -> Any:
    """A Hugging Face folder's language model as transformers builds it, in float32.

    Where products of attention are bounded it must be its slow attention: the other one leaves the bound out.
    """
    settings = AutoConfig.from_pretrained(folder)
    capped = getattr(settings, "attn_logit_softcapping", None) is not None
    options = {"attn_implementation": "eager"} if capped else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def hf_response_logits(folder: Path, sequences: Sequences) -> torch.Tensor:
    """Float32 logits [response tokens, vocab_size] of a Hugging Face folder, row after row."""
    model = hf_model(folder)
    rows = zip(sequences.input_ids.unbind(), sequences.response_lengths.tolist(), strict=True)
    return torch.cat([model(ids[None]).logits[0, len(ids) - length - 1 : -1] for ids, length in rows])
