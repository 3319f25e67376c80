"""Write a project to begin with: a configuration, a reward function, data files. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_rl.config.file_kinds import FILE, NOTHING, kind_of
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.row_files import UTF8_MARK
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.planning.checked_config import checked
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.hub_cache import model_folder
from megatron_rl.planning.memory_report import memory_report, with_kv_cache
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.starter.run_text import CPU_BATCHES, GPU_BATCH, GPUS_PER_NODE, SMALL_BYTES, BatchSize, RunText
from megatron_rl.starter.task_kinds import BUILT_IN_MATH, TASK_KINDS, rows

CONFIG, REWARD = "run.yaml", "reward.py"
PROMPT_OPTION, TRUTH_OPTION, NO_TRUTH = "--prompt-key", "--ground-truth-key", "none"
"""Options that name columns, and the value of the second where there is none."""
WRITTEN = (
    CONFIG,
    REWARD,
    *(f"{part}.{suffix}" for suffix in ("jsonl", "parquet") for part in ("train", "val")),
    "model",
)
"""Files and folders that a project may begin with."""
NUM_TRAIN, NUM_VAL = 256, 32
MOST_HELD_OUT = 64
"""Rows of a user's file that are held out for validation, at most."""
Attempt = Callable[[int, int, BatchSize], tuple[RunConfig | None, Sequence[Violation]]]
ROWS_AT_ONCE = 1024
MOST_STEP_SECONDS = 60.0
"""Seconds of a step on a CPU that a first run may take."""
GENERATION = "gen"
SPECIAL_TOKENS = ("<pad>", "<eos>")


@dataclass(frozen=True)
class OwnFiles:
    """Files of a user's. val: None: rows of `train` are to be held out. num_rows: of both. keys: of `data`, by which
    they are read.
    """

    train: Path
    val: Path | None
    num_rows: int
    keys: dict[str, Any]


def write_project(
    folder: Path,
    model: str,
    name: str,
    num_gpus: int,
    is_tiny: bool,
    own: OwnFiles | None = None,
    limits: tuple[int, int] | None = None,
) -> RunConfig:
    """Write the files and return the configuration. num_gpus: 0 is one CPU process.

    model: a folder, or a name of the Hub. name: a kind of `TASK_KINDS`, or `BUILT_IN_MATH`. own: the user's data, in
    place of made-up questions. limits: tokens of the longest prompt and response, for own data.

    On GPUs the first layout is taken whose plan fits one of 80 GB: the smallest TP, then the fewest stages. On a CPU
    the batch shrinks until a step takes a minute. Raises ConfigError where the model cannot be trained at all, or in no
    layout of that many GPUs.
    """
    suffix = ".jsonl" if own is None else own.train.suffix
    targets = {each: folder / each for each in (CONFIG, REWARD, f"train{suffix}", f"val{suffix}")}
    there = [each for each, path in targets.items() if os.path.lexists(path)]
    if there:
        raise ConfigError(f"{folder} already has {', '.join(there)}; try: another folder, such as {folder}_2")
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder.resolve()
    try:
        train, val = whole / f"train{suffix}", whole / f"val{suffix}"
        if own is None:
            write_questions(train, val, name, not is_tiny and has_template(model_folder(model).path))
        elif own.val is None:
            split(own.train, held_out_rows(own.num_rows, MOST_HELD_OUT), train, val)
        else:
            train, val = own.train, own.val
        text = RunText(
            train,
            val,
            model,
            "math" if name == BUILT_IN_MATH else whole / REWARD,
            whole / "output",
            num_gpus,
            is_tiny,
            is_small(model_folder(model).path),
            *(limits or (TASK_KINDS[name].prompt_tokens, TASK_KINDS[name].answer_tokens)),
            {} if own is None else own.keys,
        )
        if isinstance(text.reward, Path):
            replace_file(folder / REWARD, TASK_KINDS[name].reward.encode())
        return choose_layout(folder / CONFIG, text)
    except ConfigError:
        for path in targets.values():
            path.unlink(missing_ok=True)
        for each in new:
            with suppress(OSError):  # something of another process is in it
                each.rmdir()
        raise


def write_questions(train: Path, val: Path, name: str, is_chat: bool) -> None:
    """Write made-up questions of a kind to train on, and others to validate with."""
    for file, number, seed in ((train, NUM_TRAIN, 1), (val, NUM_VAL, 2)):
        made = rows(TASK_KINDS[name], name, number, seed, is_chat)
        replace_file(file, "".join(json.dumps(row) + "\n" for row in made).encode())


def choose_layout(file: Path, text: RunText) -> RunConfig:
    """Write run.yaml with the first layout or batch that will do, and return it. Raises ConfigError where none does."""
    has_weights = any(model_folder(text.model).path.glob("*.safetensors"))

    def attempt(tp: int, pp: int, batch: BatchSize) -> tuple[RunConfig | None, Sequence[Violation]]:
        replace_file(file, text.text(tp, pp, batch).encode())
        run = checked(file, (), without_files=not has_weights)
        return (None if run.violations else run.config), run.violations

    return _first_batch(attempt) if not text.num_gpus else _first_layout(attempt, text.num_gpus)


def _first_batch(attempt: Attempt) -> RunConfig:
    for batch in CPU_BATCHES:
        config, violations = attempt(1, 1, batch)
        if config is None:
            raise_problems("no run could start with this model", violations)
        elif batch is CPU_BATCHES[-1] or planned_run(config, 0).step_seconds <= MOST_STEP_SECONDS:
            return config
    raise AssertionError("the last batch is taken")


def _first_layout(attempt: Attempt, num_gpus: int) -> RunConfig:
    broken, too_large, least = list[Violation](), "", 0.0
    for tp, pp in layouts(num_gpus):
        if tp * pp < least:
            continue
        config, violations = attempt(tp, pp, GPU_BATCH)
        if config is None:
            broken = broken or [*violations]
            continue
        used, usable = memory_of(config)
        if used <= usable:
            return config
        too_large = too_large or f"it needs {used / 1e9:.1f} GB of {usable / 1e9:.1f} GB"
        # More ranks to a model take at most their share of what a rank holds.
        least = 0.9 * used / usable * tp * pp
    if too_large:
        raise ConfigError(f"no layout of {num_gpus} GPUs was planned to fit: {too_large}; try: --gpus {2 * num_gpus}")
    raise_problems("no run could start with this model", broken)
    raise AssertionError("there is always a layout of one rank")


def has_template(model: Path) -> bool:
    """Whether a model's tokenizer has a chat template. Raises ConfigError for settings that cannot be read."""
    file = model / "tokenizer_config.json"
    if kind_of(model / "chat_template.jinja") == FILE:
        return True
    try:
        return kind_of(file) != NOTHING and "chat_template" in read_json_object(file)
    except UnreadableFileError as error:
        raise ConfigError(f"the tokenizer of {model} cannot be read: {error}") from error


def is_small(model: Path) -> bool:
    """Whether the weights in a folder are those of a small model; not where there are none yet."""
    sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
    return 0 < sum(sizes) <= SMALL_BYTES


def check_name(option: str, path: str | Path) -> None:
    """Raise ConfigError for a path that run.yaml cannot hold."""
    text = str(path)
    if not text.isprintable() or "${" in text:
        rule = "must be a path of printable characters in UTF-8 without ${, which run.yaml reads as the name of a key"
        raise ConfigError(f"{option} {text} {rule}; try: {option} {re.sub(r'[^A-Za-z0-9_./-]+', '_', text)}")


def layouts(num_gpus: int) -> Iterator[tuple[int, int]]:
    """TP and PP to try on that many GPUs; (1, 1) on a CPU."""
    most = max(1, num_gpus)
    for pp in (size for size in (1, 2, 4, 8, 16) if most % size == 0):
        yield from ((tp, pp) for tp in (1, 2, 4, 8) if tp <= min(most, GPUS_PER_NODE) and most % (tp * pp) == 0)


def memory_of(config: RunConfig) -> tuple[int, int]:
    """Return the bytes that a rank is planned to need, and those that a GPU has for it."""
    hardware = planned_hardware(config)
    memory = memory_report(with_kv_cache(config, hardware), RunModels(config), hardware)
    return memory.peak, memory.usable


def held_out_rows(num_rows: int, most: int) -> set[int]:
    """Return the numbers of the rows to hold out: a tenth, at least 1 and at most `most`, spread evenly.

    The first row is trained on. Raises ValueError for fewer than 2 rows.
    """
    if num_rows < 2:
        raise ValueError(f"{num_rows} rows cannot be split")
    number = max(1, min(most, num_rows // 10))
    return {(place + 1) * num_rows // number - 1 for place in range(number)}


def split(source: Path, held_out: set[int], train: Path, val: Path) -> None:
    """Write the rows of a parquet or jsonl file, as they are, to two files of its kind. Raises OSError."""
    if source.suffix == ".parquet":
        _split_parquet(source, held_out, train, val)
        return
    lines = [line for line in source.read_bytes().removeprefix(UTF8_MARK).split(b"\n") if line.strip()]
    for target, is_held in ((train, False), (val, True)):
        rows = (line + b"\n" for row, line in enumerate(lines) if (row in held_out) == is_held)
        replace_file(target, b"".join(rows))


def _split_parquet(source: Path, held_out: set[int], train: Path, val: Path) -> None:
    numbers = count()
    with pyarrow.parquet.ParquetFile(source) as opened:
        schema = opened.schema_arrow
        with (
            pyarrow.parquet.ParquetWriter(train, schema) as trained,
            pyarrow.parquet.ParquetWriter(val, schema) as validated,
        ):
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                is_held = [next(numbers) in held_out for _ in range(batch.num_rows)]
                trained.write_batch(batch.filter(pyarrow.array([not held for held in is_held])))
                validated.write_batch(batch.filter(pyarrow.array(is_held)))


@dataclass(frozen=True)
class PlannedRun:
    """step_seconds: of a step. seconds: of all steps and validations. memory_bytes: of the rank that needs most."""

    step_seconds: float
    seconds: float
    num_steps: int
    memory_bytes: int
    hardware: str

    def __str__(self) -> str:
        """Return the line that `init` ends with."""
        return (
            f"planned on {self.hardware}: {self.step_seconds:.3g} s a step, {duration(self.seconds)} for "
            f"{self.num_steps} steps with validation; {self.memory_bytes / 1e9:.2g} GB for each rank"
        )


def planned_run(config: RunConfig, num_held_out: int) -> PlannedRun:
    """Plan a configuration that has passed preflight. num_held_out: prompts of a validation."""
    hardware = planned_hardware(config)
    plan = RunPlan.of(with_kv_cache(config, hardware), hardware)
    trainer, steps = config.trainer, config.trainer.num_steps
    validations = trainer.val_before_train + -(-steps // trainer.test_freq) if trainer.test_freq > 0 else 0
    share = num_held_out * config.actor_rollout_ref.rollout.val_kwargs.n / config.batch_sizes.num_generated_samples
    seconds = steps * plan.step_seconds + validations * share * plan.seconds[GENERATION]
    return PlannedRun(plan.step_seconds, seconds, steps, plan.memory.peak, hardware.name)


def duration(seconds: float) -> str:
    """Return seconds in the largest unit of which there are at least two."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a Qwen2 of 0.4 M parameters and a tokenizer of bytes as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    pad, eos = SPECIAL_TOKENS
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token=eos).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
