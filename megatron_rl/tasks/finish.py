"""The end of a stage: the export and its parity, curves, summary and the table of before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from megatron_rl.checkpoint.hf_folder import removing_unfinished
from megatron_rl.checkpoint.score_statistics import ScoreStatistics, write_statistics
from megatron_rl.checkpoint.storage import storing
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.report import draw, draw_steps, export_bound, hf_response_logits
from megatron_rl.errors import ParityError
from megatron_rl.observe.summary import before_after_table, write_summary
from megatron_rl.records import AnswerBatch, Sequences
from megatron_rl.roles.scorer import TrainedScorer
from megatron_rl.roles.tuned import TunedPolicy
from megatron_rl.tasks.held_out import Measure
from megatron_rl.tasks.task_run import TaskRun

NUM_PARITY_ROWS = 8
"""Held-out rows on which the exported model is compared with the trainer."""
HF_MODEL = "hf_model"


def finish_stage(run: TaskRun, measure: Measure, export: Callable[[Path], float]) -> dict[str, Any]:
    """Write everything a user takes home from a stage; returns the summary. Raises ParityError, StorageError.

    export: writes the model to a folder, and returns how far it is from the trainer's.
    """
    held_out, folder = run.held_out, run.logger.folder.path
    if not held_out.losses:  # every step had been taken before, without a validation
        held_out.losses.append(measure()["val/loss"])
    run.logger.keep_folder()
    difference = None
    if run.config.trainer.export_hf:
        with run.logger.clock.phase("export"), removing_unfinished(folder / HF_MODEL), storing(HF_MODEL, folder):
            difference = export((folder / HF_MODEL).resolve())
    summary = summarise(run, difference)
    with storing("summary.json", folder):
        write_summary(folder / "summary.json", summary)
    if "jsonl" in run.config.trainer.logger:
        draw(run.logger)
    draw_steps(run.logger)
    if summary["val_loss_before"] is not None:
        rows = [("held-out loss", summary["val_loss_before"], summary["val_loss_after"])]
        run.logger.console.print(before_after_table(rows))
    if run.config.trainer.save_freq > 0 and held_out.step_to_keep() is not None:
        run.logger.say(f"lowest held-out loss {held_out.best_loss:.4g} after step {held_out.best_step}, which is kept")
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    run.logger.say(f"written to {folder}: {', '.join(files)}")
    return summary


def summarise(run: TaskRun, difference: float | None) -> dict[str, Any]:
    """The stage in a dozen numbers."""
    config, held_out = run.config, run.held_out
    trainer, placement = config.trainer, Placement.of(config)
    pool = placement.pools[placement.leader.pool]
    tp_size, pp_size = pool.layout.tensor_model_parallel_size, pool.layout.pipeline_model_parallel_size
    cp_size = pool.layout.context_parallel_size
    before = held_out.losses[0] if trainer.val_before_train else None
    return {
        "stage": trainer.stage,
        "val_loss_before": before,
        "val_loss_after": held_out.losses[-1],
        "val_last": held_out.last,
        "best_step": held_out.best_step,
        "best_val_loss": None if held_out.best_step is None else held_out.best_loss,
        "steps": trainer.num_steps,
        "wall_s": round(time.monotonic() - run.started, 1),
        "layout": {
            "world_size": placement.world_size,
            "tp": tp_size,
            "pp": pp_size,
            "cp": cp_size,
            "dp": pool.world_size // (tp_size * pp_size * cp_size),
        },
        "pools": {name: [role.name for role in one.roles] for name, one in placement.pools.items()},
        "seed": trainer.seed,
        "skipped_updates": run.logger.updates.totals,
        "hf_export_diff_max": difference,
    }


def exported_policy(policy: TunedPolicy, rows: Sequences, target: Path, config: RunConfig) -> float:
    """Export a policy; largest difference of its logits to the trainer's on these rows. Raises ParityError."""
    policy.export_hf(target).get()
    answers: Any = policy.response_logits(rows).get()  # no records, so one of each data-parallel rank
    return compared(hf_response_logits(target, rows), torch.cat(answers), target, config)


def exported_scorer(
    scorer: TrainedScorer, batch: AnswerBatch, target: Path, config: RunConfig, told: ScoreStatistics
) -> float:
    """Export a reward model with what is told of its held-out scores; largest difference of its scores to the trainer's
    on these answers. Raises ParityError.
    """
    scorer.export_hf(target).get()
    write_statistics(target, told)
    ours = scorer.scores(batch).get().scores.values()
    return compared(hf_scores(target, batch), ours, target, config)


@torch.no_grad()
def hf_scores(folder: Path, batch: AnswerBatch) -> torch.Tensor:
    """Float32 scores [N] that a Hugging Face classifier with one label gives the answers, without the token after."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.cat([model(ids[None, :-1]).logits[:, 0] for ids in batch.rows().input_ids.unbind()])


def compared(theirs: torch.Tensor, ours: torch.Tensor, target: Path, config: RunConfig) -> float:
    """The largest difference. Raises ParityError where a float32 model's is beyond `export_bound`."""
    differences = (theirs - ours).abs()
    largest = float(differences.max()) if differences.numel() else 0.0
    bound = export_bound(ours)
    if Placement.of(config).leader.megatron.dtype == "float32" and not largest <= bound:
        what = f"what the exported model in {target} computes differs from the trainer's by {largest:.3g}"
        raise ParityError(f"{what}; the bound is {bound:.2g}")
    return largest
