"""A project that trains on a user's own file, and what was found in it."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.row_files import count_rows
from megatron_rl.errors import ConfigError
from megatron_rl.planning.hub_cache import model_folder
from megatron_rl.starter.own_data import (
    Ask,
    OwnData,
    PromptLengths,
    longest_truth,
    prompt_lengths,
    read_own_data,
)
from megatron_rl.starter.project import (
    MOST_HELD_OUT,
    TRUTH_OPTION,
    check_name,
    has_template,
    held_out_rows,
    write_project,
)
from megatron_rl.starter.task_kinds import (
    BUILT_IN_MATH,
    EXACT,
    MATH,
    SCORE,
    TASK_KINDS,
    is_gsm8k,
    last_number,
    suited_kind,
)

KIND_OPTION = "--kind"
LONGEST_SHOWN = 600
"""Characters of a prompt or an expected answer that are shown."""
STEP = 16
"""Limits are multiples of that many tokens."""
MOST_PROMPT_TOKENS = 2048
"""A few longer prompts are left out, because each rank has room for the longest one that is allowed."""
RESPONSE_TOKENS = {MATH: (16, 128, 1024), BUILT_IN_MATH: (16, 128, 1024), SCORE: (16, 64, 512)}
"""Kind -> tokens of a response: of the tiny model, of another one on a CPU, on GPUs."""


def own_project(
    folder: Path,
    model: str,
    name: str | None,
    num_gpus: int,
    is_tiny: bool,
    files: tuple[Path, Path | None],
    options: tuple[str | None, str | None],
    ask: Ask,
) -> tuple[RunConfig, list[str]]:
    """Write a project that trains on files of the user's; return the configuration, and lines on what was found.

    name: a kind of `TASK_KINDS`; None: as the expected answers suggest. files: to train on and to validate with.
    options: columns of prompts and expected answers, where they are given. Raises ConfigError.
    """
    (train, val), source = files, model_folder(model).path
    for option, file in (("--data", train), ("--val-data", val)):
        if file is not None:
            check_name(option, os.path.realpath(file))
    own = read_own_data(train, val, options, has_template(source), ask, needs_truth=name != SCORE)
    if val is None and len(own.rows) < 2:
        raise ConfigError(f"--data {train} has 1 row, and one must be held out; try: --val-data FILE, or more rows")
    name = own_kind(own, ask) if name is None else name
    if own.keys.ground_truth_key is None and name != SCORE:
        raise ConfigError(
            f"{KIND_OPTION} {name} needs a column of expected answers: give {TRUTH_OPTION}, or --kind score"
        )
    lengths = prompt_lengths(own, source)
    own, limits, left_out = limits_of(own, lengths, source, name, num_gpus, is_tiny)
    config = write_project(folder, model, name, num_gpus, is_tiny, own.files, limits)
    return config, [*found(own, name, lengths), *([left_out] if left_out else []), *held_out(own, config)]


def own_kind(own: OwnData, ask: Ask) -> str:
    """Return the kind that the expected answers suggest, or that the user chooses. Raises ConfigError."""
    if own.keys.ground_truth_key is None:
        return SCORE
    kind = suited_kind(own.truths)
    if kind == BUILT_IN_MATH and find_spec("math_verify") is None:
        rule = "the expected answers are formulas, which the package math-verify compares"
        raise ConfigError(f"{rule}: pip install 'math-verify[antlr4_13_2]', or give {KIND_OPTION}")
    if kind is not None:
        return kind
    kinds = "; ".join(f"{name}: {each.about}" for name, each in TASK_KINDS.items())
    question = f"Kind of task, for expected answers such as {shown(own.truths[0], 80)!r} ({kinds})"
    return ask(KIND_OPTION, question, [SCORE, EXACT, MATH])


def found(own: OwnData, name: str, lengths: PromptLengths) -> list[str]:
    """Return the columns, the first prompt as the policy gets it, and its expected answer."""
    keys = own.keys
    how = "a user's message of the model's chat template" if keys.prompt_as_chat else "as it is"
    lines = [f"{own.train}: {len(own.rows)} rows{'' if own.val is None else f', with those of {own.val}'}"]
    lines.append(
        f"prompts: column {keys.prompt_key}, {how}" if keys.prompt_as_chat else f"prompts: column {keys.prompt_key}"
    )
    truth = keys.ground_truth_key
    if truth is not None:
        others = f"; {TRUTH_OPTION} would take {' or '.join(own.others)}" if own.others else ""
        lines.append(f"expected answers: column {truth}{others}")
    lines.append(f"reward function: {reward_text(name, own.truths)}")
    if name == MATH and (lacking := [row for row, each in enumerate(own.truths) if last_number(str(each)) is None]):
        lines.append(
            f"{len(lacking)} expected answers have no number, the first in row {lacking[0]}: none is ever right"
        )
    size = "" if lengths.num_tokens is None else f", {lengths.num_tokens} tokens"
    lines += [f"the first prompt, as the model reads it{size}:", *indented(lengths.shown)]
    return lines + ([] if truth is None else ["its expected answer:", *indented(str(own.truths[0]))])


def reward_text(name: str, truths: list[Any]) -> str:
    """Return how a kind's reward function scores, in words."""
    if name == BUILT_IN_MATH:
        return "the built-in math, which compares formulas by math-verify (custom_reward_function.name)"
    about = TASK_KINDS[name].about
    mark = ", here what follows ####" if name == MATH and truths and is_gsm8k(truths[0]) else ""
    return f"{name}, in reward.py: {about}{mark}"


def held_out(own: OwnData, config: RunConfig) -> list[str]:
    """Return lines on rows that were held out for validation, and on too few rows for a batch, if there are some."""
    data, lines = config.data, list[str]()
    batch = data.train_batch_size
    if own.val is None:
        num_held = len(held_out_rows(len(own.rows), MOST_HELD_OUT))
        lines.append(
            f"no --val-data: {num_held} of {len(own.rows)} rows held out for validation, so the rows were copied into "
            f"{data.train_files} and {Path(data.val_files).name} beside it"
        )
    num_train = count_rows(str(data.train_files), batch)
    if num_train < batch:
        rule = f"data.train_batch_size={batch} is more than the {num_train} rows to train on, so a step repeats them"
        lines.append(f"{rule}: add rows, because few teach little")
    return lines


def shown(value: Any, most: int = LONGEST_SHOWN) -> str:
    """Return a text, without its middle if it is long."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def indented(text: str) -> list[str]:
    """Return the lines of a text, indented, without characters that a terminal would obey."""
    lines = shown(text).splitlines() or [""]
    return ["    " + "".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines]


def limits_of(
    own: OwnData, lengths: PromptLengths, model: Path, name: str, num_gpus: int, is_tiny: bool
) -> tuple[OwnData, tuple[int, int], str]:
    """Return the data, tokens of the longest prompt and response, and a sentence about prompts that are left out.

    A response has room for the longest expected answer and a token that ends it, but at most half of the model's
    longest sequence. Raises ConfigError for a model that cannot be read.
    """
    positions = _positions(model)
    response = 0 if own.keys.ground_truth_key is None else _rounded(longest_truth(own, model) + 1)
    if name != EXACT:
        usual, most_response = RESPONSE_TOKENS[name][0 if is_tiny else 2 if num_gpus else 1], RESPONSE_TOKENS[name][2]
        response = max(usual, min(response, most_response))
    response = max(1, min(response, positions // 2))
    most = min(MOST_PROMPT_TOKENS, positions - response)
    prompt = min(_rounded(lengths.longest), most)
    if lengths.longest <= prompt:
        return own, (prompt, response), ""
    line = f"prompts of more than {prompt} tokens are left out (data.filter_overlong_prompts); the longest has "
    keys = replace(own.keys, filter_overlong_prompts=True)
    return replace(own, keys=keys), (prompt, response), f"{line}{lengths.longest}"


def _rounded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _positions(model: Path) -> int:
    """Tokens of the longest sequence of a model; of one whose config.json does not have it, any number."""
    try:
        settings = ModelFolder(model).settings
    except UnreadableFileError as error:
        raise ConfigError(f"{model} cannot be read: {error}") from error
    positions = settings.get("max_position_embeddings")
    return positions if isinstance(positions, int) else 1 << 30
