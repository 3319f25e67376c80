"""Evaluate a policy: generate responses to held-out prompts in parts, record every response, and write numbers with
intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.storage import storing
from megatron_rl.config.algorithms import has_scores
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.evaluation_files import (
    ANSWERS_FILE,
    SETTINGS_FILE,
    AnswersFile,
    refuse_other_settings,
    settings_of,
)
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.controller.run import Run, open_run
from megatron_rl.controller.run_logger import RunLogger, prompt_texts
from megatron_rl.observe.appended_file import AppendedFile, replace_file
from megatron_rl.observe.evaluation_table import Estimate, evaluation_table, table_lines
from megatron_rl.observe.summary import finite_or_null, plain_table, write_summary
from megatron_rl.scoring.sampled_batch import SampledBatch

TABLE_FILE, PICTURE_FILE = "evaluation_table.json", "evaluation.png"
ROUNDS = 4
"""Responses of a part for each place of an engine. Fewer leave more places empty at its end; more are lost by a
kill."""


def evaluate(config: RunConfig, local: bool = False) -> dict[str, dict[str, Any]]:
    """Generate responses to the prompts of `data.val_files`; return the metrics of `evaluation_table.json`.

    config: made by `config.eval_config`. Goes on where an evaluation with the same settings in
    `trainer.default_local_dir` was stopped. Raises ConfigError where one of other settings or content is there, or a
    damaged one; else as `train`.
    """
    return with_repairs(config, local, lambda repairs: _evaluate_once(repairs, local))


def _evaluate_once(repairs: Repairs, local: bool) -> dict[str, dict[str, Any]]:
    config = repairs.config
    folder = Path(config.trainer.default_local_dir)
    settings = settings_of(config)
    refuse_other_settings(folder, settings)
    with open_run(repairs, local) as run, storing("the evaluation", folder):
        replace_file(folder / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())
        num_samples, is_scored = config.actor_rollout_ref.rollout.val_kwargs.n, has_scores(config)
        numbers = run.validation.data.batch(range(len(run.validation.data)))["index"].tolist()
        file = AnswersFile(folder / ANSWERS_FILE, num_samples, frozenset(numbers), is_scored)
        is_there = {row["index"] for row in file.whole_rows()}
        left = [place for place, number in enumerate(numbers) if number not in is_there]
        if is_there:
            run.logger.say(f"resuming with {len(left)} of {len(numbers)} prompts; the others are done")
        answer_left(run, left, folder, num_samples)
        return write_table(run.logger, folder, file.whole_rows(), is_scored)


def answer_left(run: Run, left: Sequence[int], folder: Path, num_samples: int) -> None:
    """Generate responses to the prompts at these places, part by part, and append each part to the file of
    responses."""
    rollout = run.config.actor_rollout_ref.rollout
    num_replicas = run.pools.placement.pool_of(ROLLOUT).world_size // rollout.replica_size
    size = max(1, ROUNDS * rollout.max_num_seqs * num_replicas // num_samples)
    file = AppendedFile(folder / ANSWERS_FILE)
    try:
        for first in range(0, len(left), size):
            places = left[first : first + size]
            with run.logger.clock.phase("testing"):
                rows = answer_rows(run, run.validation.answered(places, 0))
            file.append("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode())
            run.logger.say(f"generated responses to {first + len(places)} of {len(left)} prompts")
    finally:
        file.close()


def answer_rows(run: Run, batch: SampledBatch) -> list[dict[str, Any]]:
    """One line per response, JSON-ready: its prompt's row number, its number among the prompt's responses, texts, the
    number of its tokens, whether it was cut off, and where something scores: score, acc, pred, failure and extras.
    """
    rows, scored = batch.rows, batch.all_scored
    table = scored.table(prompt_texts(run.logger.tokenizer, rows), 0)
    is_scored = has_scores(run.config)
    accuracies = scored.variables().get("acc") if is_scored else None
    lines = []
    for row, content in enumerate(table):
        del content["step"]
        if not is_scored:
            content = {name: content[name] for name in ("input", "output", "data_source")}
        if accuracies is not None:
            content["acc"] = accuracies[row]
        place = {"index": int(rows["index"][row]), "sample": int(rows["sample"][row])}
        drawn = {"num_tokens": int(rows.num_sampled[row]), "is_cut_off": bool(rows["truncated"][row])}
        lines.append(finite_or_null(place | content | drawn))
    return lines


def cut_off(rows: Sequence[dict[str, Any]], limit: int) -> list[str]:
    """Return a line where responses were cut off at the limit, in tokens."""
    number = sum(row["is_cut_off"] for row in rows)
    where = f"cut off at data.max_response_length={limit}"
    return (
        [f"{number} of {len(rows)} responses were {where}; try: data.max_response_length={2 * limit}"] if number else []
    )


def write_table(
    logger: RunLogger, folder: Path, rows: Sequence[dict[str, Any]], is_scored: bool
) -> dict[str, dict[str, Any]]:
    """Write and print the numbers, and draw those that depend on k."""
    for line in cut_off(rows, logger.config.data.max_response_length):
        logger.say(line)
    model = Path(logger.config.actor_rollout_ref.model.path)
    exported = f"; {model.name}, the exported model, stays there" if model.parent.resolve() == folder.resolve() else ""
    if not is_scored:
        logger.say(f"{len(rows)} responses written to {folder / ANSWERS_FILE}{exported}")
        return {}
    table = evaluation_table(rows)
    numbers = {
        source: {name: value._asdict() if isinstance(value, Estimate) else value for name, value in values.items()}
        for source, values in table.items()
    }
    write_summary(folder / TABLE_FILE, numbers)
    headings = ("source", "number", "value", "95% interval")
    logger.console.print(plain_table("Evaluation", headings, table_lines(table)), markup=False)
    written = [ANSWERS_FILE, TABLE_FILE]
    if any("pass@1" in values for values in table.values()):
        from megatron_rl.observe.pictures import plot_evaluation  # matplotlib is not for the start

        plot_evaluation(table, folder / PICTURE_FILE)
        written.append(PICTURE_FILE)
    logger.say(f"written to {folder}: {', '.join(written)}{exported}")
    return numbers
