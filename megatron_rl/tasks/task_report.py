"""The end of a task: the export of a reward model, and the task's numbers in the summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.checkpoint.score_statistics import ScoreStatistics, write_statistics
from megatron_rl.config.steps import validates
from megatron_rl.controller.report import export_adapter, export_and_compare, finish, with_engine_norms
from megatron_rl.controller.run_images import tensors_of_part
from megatron_rl.records import Batch, answer_rows
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.sampling.image_features import PatchesOf
from megatron_rl.tasks.task_run import TaskRun

NUM_PARITY_ROWS = 8
"""Held-out rows on which the exported model is compared with the trainer."""


def finish_task(run: TaskRun, export: Callable[[], float]) -> dict[str, Any]:
    """Write everything a user takes home from a task; returns the summary. Raises ParityError, StorageError.

    export: writes the model to the run's folder, and returns how far it is from the trainer's.
    """
    held_out, trainer = run.held_out, run.config.trainer
    run.logger.title("Finishing: export, comparison, curves")
    if validates(trainer) and not held_out.losses:  # every step had been taken before, without a validation
        held_out.losses.append(held_out.measure()["val/loss"])
    run.logger.keep_folder()
    results = {
        "stage": trainer.stage,
        "val_last": held_out.last,
        "best_step": held_out.best_step,
        "best_val_loss": None if held_out.best_step is None else held_out.best_loss,
        "hf_export_diff_max": export() if trainer.export_hf else None,
    }
    lines = []
    if trainer.save_freq > 0 and held_out.step_to_keep() is not None:
        lines = [f"lowest held-out loss {held_out.best_loss:.4g} after step {held_out.best_step}, which is kept"]
    return finish(run, results, {"val_loss": held_out.losses}, {"val_loss": "held-out loss"}, lines)


def export_scorer(run: TaskRun, scorer: TrainableRewardModel, batch: Batch, statistics: ScoreStatistics) -> float:
    """Export a reward model with the statistics of its held-out scores; largest score difference to the trainer.

    Raises as `export_and_compare`.
    """

    def write(target: Path) -> None:
        scorer.export_hf(target).get()
        write_statistics(target, statistics)

    def scores() -> torch.Tensor:
        return scorer.scores(batch).get().flat("answer_scores")

    export_adapter(run, scorer)
    return export_and_compare(run, "scores", write, scores, lambda target: hf_scores(target, batch, run.patches_of))


@torch.no_grad()
def hf_scores(folder: Path, batch: Batch, patches_of: PatchesOf | None = None) -> torch.Tensor:
    """Float32 scores [N] of the responses by a Hugging Face classifier with one label, without the token after each.

    patches_of: gives the patches of images; the score is then made of the states of transformers' base model, as it has
    no classifiers of most models that read images.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification  # late: they import every kind of layer

    rows = answer_rows(batch)
    if patches_of is None:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        model = with_engine_norms(model.eval())
        return torch.cat([model(ids[None, :-1]).logits[:, 0] for ids in rows["input_ids"].unbind()])
    model = with_engine_norms(AutoModel.from_pretrained(folder, dtype=torch.float32).eval())
    folder_of_head, head = HFFolder(folder), torch.empty(1, model.config.get_text_config().hidden_size)
    folder_of_head.copy_box("score.weight", ((0, 1), (0, head.shape[1])), tuple(head.shape), head)
    scores, first = [], 0
    for ids in rows["input_ids"].unbind():
        shown = tensors_of_part(rows, first, patches_of, ids[:-1])
        first += len(ids)
        states = model(input_ids=ids[None, :-1], use_cache=False, **shown).last_hidden_state
        scores.append(states[0, -1] @ head[0])
    return torch.stack(scores)
