"""The life of one recorded sample: prompt, tokens, versions, rewards, advantages, its share of the loss. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_rl.errors import ConfigError
from megatron_rl.observe.sample_files import RecordedStep
from megatron_rl.view.sample_pictures import digests_of

TOKEN_NUMBERS = {
    "versions": "version",
    "rollout_log_probs": "engine",
    "old_log_probs": "trainer",
    "difference": "difference",
    "ratio": "ratio",
    "ref_log_probs": "reference",
    "entropy": "entropy",
    "old_values": "value",
    "turn_rewards": "turn's reward",
    "rewards": "reward",
    "returns": "return",
    "advantages": "advantage",
    "rollout_weights": "weight",
    "kept": "kept",
    "trained": "trained",
    "loss_terms": "loss",
}
"""Numbers of sampled tokens, in the order in which they arise, and their headings. `difference` and `ratio` follow from
the log-probs of engine and trainer.
"""
NEEDED_COLUMNS, NEEDED_TOTALS = ("groups", "scores", "sampled"), ("loss", "loss_magnitude")
SINGLE_COLUMNS = ("groups", "scores", "truncated", "failed")
KINDS = {"groups": "biu", "rollout_log_probs": "f", "old_log_probs": "f"}
"""Kinds of numpy's types that a column may have, where not every kind of number fits."""
NEEDED_DETAILS = ("index", "sample", "data_source", "input", "output", "gts", "tokens")
TABLE_NAMES = {
    "input",
    "output",
    "gts",
    "score",
    "step",
    "data_source",
    "failure",
    "index",
    "sample",
    "tokens",
    "prompt",
    "images",
}
"""Entries of a sample's row that are no further numbers or texts of its reward."""


def plain(value: Any) -> Any:
    """Return a number of the record as JSON has it: a float32 as the shortest decimal that is that float32."""
    if isinstance(value, np.floating):
        return float(str(value)) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def plain_row(values: Any) -> list[Any]:
    """Return the numbers of an array [N], as `plain` gives each."""
    return [plain(value) for value in values]


def token_numbers(recorded: RecordedStep, row: int) -> dict[str, list[Any]]:
    """Return name -> number of each sampled token of a row, of what the step recorded."""
    columns = {name: recorded.of(name, row) for name in TOKEN_NUMBERS}
    engine, trainer = columns["rollout_log_probs"], columns["old_log_probs"]
    if engine is not None and trainer is not None:
        columns["difference"] = difference = trainer - engine
        columns["ratio"] = np.exp(difference.astype(np.float64)).astype(np.float32)
    return {name: plain_row(values) for name, values in columns.items() if values is not None}


def outcome_of(recorded: RecordedStep, row: int) -> str:
    """Return how a sample ended: ended, cut off, failed episode, or why its rule failed."""
    if bool(recorded.of("failed", row)):
        return "failed episode"
    if failure := recorded.rows[row].get("failure"):
        return f"reward function {failure}".replace("_", " ")
    return "cut off" if bool(recorded.of("truncated", row)) else "ended"


def check_rows(recorded: RecordedStep) -> None:
    """Raise ConfigError for a step that does not have what a sample's life is made of."""
    lacks = [name for name in NEEDED_COLUMNS if name not in recorded.columns]
    lacks += [name for name in NEEDED_TOTALS if name not in recorded.totals]
    lacks += [name for name in NEEDED_DETAILS if not all(name in row for row in recorded.rows)]
    ragged = [name for name in ("sampled", *TOKEN_NUMBERS) if name in recorded.columns]
    lacks += [f"lengths of {name}" for name in ragged if name not in recorded.lengths]
    if not lacks:
        ends = recorded.lengths["sampled"].cumsum()
        counts = [np.count_nonzero(part) for part in np.split(recorded.columns["sampled"], ends)][: len(ends)]
        lacks = [f"{name} of each sampled token" for name in ragged[1:] if counts != recorded.lengths[name].tolist()]
        texts = [row["tokens"] if isinstance(row["tokens"], list) else [] for row in recorded.rows]
        lacks += ["the text of each token"] if list(map(len, texts)) != recorded.lengths["sampled"].tolist() else []
    single = [name for name in SINGLE_COLUMNS if name in recorded.columns]
    lacks += [f"one value of {name} for each sample" for name in single if name in recorded.lengths]
    for name in (*single, *ragged):
        values, kinds = recorded.columns[name], KINDS.get(name, "biuf")
        lacks += [f"numeric values in {name}"] if values.dtype.kind not in kinds or values.ndim != 1 else []
    if lacks:
        raise ConfigError(f"the recorded samples of step {recorded.step} are missing {', '.join(lacks[:4])}")


def sample_life(recorded: RecordedStep, row: int) -> dict[str, Any]:
    """Return everything that the record knows of a sample, JSON-ready. Raises ConfigError for a row that does not
    exist.

    loss: what the sample adds to the policy loss of the step, where the ratio is 1; share: the magnitudes of its
    tokens' terms over those of all samples of the step, recorded or not.
    """
    number = len(recorded.rows)
    if not number:
        raise ConfigError(f"step {recorded.step} has no recorded samples; try: another --step")
    if not 0 <= row < number:
        nearest = min(max(row, 0), number - 1)
        rule = f"step {recorded.step} has {number} recorded samples of {recorded.num_rows}"
        raise ConfigError(f"--sample {row} must be from 0 to {number - 1}: {rule}; try: --sample {nearest}")
    details, groups = recorded.rows[row], recorded.columns["groups"]
    scores = [plain(score) for score in recorded.columns["scores"][groups == groups[row]]]
    terms = recorded.of("loss_terms", row)
    magnitude, terms = recorded.totals["loss_magnitude"], np.zeros(0) if terms is None else terms.astype(np.float64)
    return {
        "step": recorded.step,
        "sample": row,
        "samples": recorded.num_rows,
        "prompt_index": details["index"],
        "number_in_group": details["sample"],
        "data_source": details["data_source"],
        "prompt": details["input"],
        "images": digests_of(details),
        "answer": details["output"],
        "ground_truth": details["gts"],
        "outcome": outcome_of(recorded, row),
        "score": plain(recorded.columns["scores"][row]),
        "rewards": {name: value for name, value in details.items() if name not in TABLE_NAMES},
        "group_scores": scores,
        "loss": float(terms.sum()),
        "loss_of_step": recorded.totals["loss"],
        "share": float(np.abs(terms).sum() / magnitude) if magnitude else 0.0,
        "tokens": details["tokens"],
        "sampled": plain_row(recorded.of("sampled", row)),
        "numbers": token_numbers(recorded, row),
    }


def life_lines(life: dict[str, Any]) -> list[str]:
    """Return the sentences of a sample's life, without its tokens."""
    scores = life["group_scores"]
    lines = [
        f"step {life['step']}, sample {life['sample']} of {life['samples']}: prompt {bare(life['prompt_index'])} of "
        f"{bare(life['data_source'])}, response {bare(life['number_in_group'])} to it",
        f"prompt   {quoted(life['prompt'])}",
        f"response {quoted(life['answer'])}  ({bare(life['outcome'])})",
        f"truth    {quoted(life['ground_truth'])}",
        f"score    {short(life['score'])}; its group: {' '.join(map(short, scores))}, "
        f"mean {short(None if None in scores else sum(scores) / len(scores), '.4g')}",
    ]
    if life["rewards"]:
        lines.append(
            "rewards  " + ", ".join(f"{bare(name)} {quoted(value)}" for name, value in life["rewards"].items())
        )
    lines.append(
        f"loss    {life['loss']:+.4g} of the step's {life['loss_of_step']:+.4g} where the ratio is 1; "
        f"{life['share']:.2%} of what all its tokens weigh"
    )
    return lines


def token_table(life: dict[str, Any]) -> tuple[list[str], Iterator[Sequence[str]]]:
    """Return (headings, one row of texts for each token of a sample)."""
    numbers = life["numbers"]

    def rows() -> Iterator[Sequence[str]]:
        place = 0
        for number, (text, is_sampled) in enumerate(zip(life["tokens"], life["sampled"], strict=True)):
            values = [shown(numbers[name][place]) if is_sampled else "" for name in numbers]
            yield (str(number), quoted(text), *values)
            place += is_sampled

    return ["", "token", *(TOKEN_NUMBERS[name] for name in numbers)], rows()


def short(value: float | None, form: str = "g") -> str:
    """Return a number as text; None is one that was not finite."""
    return "not finite" if value is None else f"{value:{form}}"


def shown(value: Any) -> str:
    """Return a number with five digits, an integer as it is."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def quoted(text: Any) -> str:
    """Return a value as JSON, in which nothing breaks a line; `Terminal` prints what would steer one as escapes."""
    return json.dumps(text, ensure_ascii=False, default=str)


def bare(text: Any) -> str:
    """Return a value as `quoted` does, a text without its quotes."""
    return quoted(text)[1:-1] if isinstance(text, str) else quoted(text)
