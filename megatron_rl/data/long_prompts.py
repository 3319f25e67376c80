"""Prompts that are longer than `data.max_prompt_length`, found before a run where that takes little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.algorithms import trains_on_rule, uses_rule
from megatron_rl.config.problems import violations_of
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.data.row_files import needed_value, read_rows
from megatron_rl.errors import ConfigError, Violation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReadTokenizer = Callable[[str], "PreTrainedTokenizerBase"]

LARGEST_FILE = 32 << 20
"""Bytes of a file that is read for this."""
MOST_TOKENISED = 200
"""Prompts of a file that are tokenised, the longest ones by their bytes."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def has_tokenizer(model: Path) -> bool:
    """Return whether a model's folder has a tokenizer."""
    return any((model / name).is_file() for name in TOKENIZERS)


def long_prompt_problems(config: RunConfig, read_tokenizer: ReadTokenizer) -> list[Violation]:
    """Return a violation for each file with a prompt that would end the run when it is read.

    Only of small files, with a tokenizer at hand, and where a prompt has more bytes than it may have tokens: the
    tokenizers' libraries are not imported otherwise. config: its rules have been checked. read_tokenizer: of a folder.
    """
    data, model = config.data, Path(config.actor_rollout_ref.model.path)
    if not config.generates or data.filter_overlong_prompts or data.truncation != "error" or not has_tokenizer(model):
        return []
    try:
        kinds = ((as_list(data.train_files), trains_on_rule(config)), (as_list(data.val_files), uses_rule(config)))
        files = {path: is_judged for paths, is_judged in kinds for path in paths if _may_be_long(path, config)}
        return [
            violation for path, judged in files.items() for violation in _too_long(path, judged, config, read_tokenizer)
        ]
    except ConfigError as error:
        return violations_of(error)


def _may_be_long(path: str, config: RunConfig) -> bool:
    file = Path(path).expanduser()
    if file.stat().st_size > LARGEST_FILE:
        return False
    key = config.data.prompt_key
    rows, _ = read_rows(path, (key,), lambda content: num_bytes(needed_value(content, key)))
    return max((size for _, size in rows), default=0) > config.data.max_prompt_length


def _too_long(path: str, is_judged: bool, config: RunConfig, read_tokenizer: ReadTokenizer) -> Iterator[Violation]:
    from megatron_rl.data.prompt_dataset import read_prompts, tokenise

    data = config.data
    places, rows = read_prompts(path, data, is_judged)
    prompts = zip(places, rows.objects("raw_prompt"), strict=True)
    longest = sorted(prompts, key=lambda located: num_bytes(located[1]), reverse=True)[:MOST_TOKENISED]
    ids = tokenise(path, longest, read_tokenizer(config.actor_rollout_ref.model.path), data)
    size, (place, _) = max(((len(each), row) for each, row in zip(ids, longest, strict=True)), key=lambda pair: pair[0])
    if size > data.max_prompt_length:
        key = "data.max_prompt_length"
        rule = f"must be at least the {size} tokens of the longest prompt of {path} (row {place.row})"
        hint = "or data.filter_overlong_prompts=true, which drops them, or data.truncation=left, right or middle"
        yield Violation({key: data.max_prompt_length}, rule, {key: size}, hint)


def num_bytes(prompt: object) -> int:
    """Return the bytes of a prompt's text: at least as many as tokens, without what a template writes around it."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    messages = prompt if isinstance(prompt, list) else []
    return sum(len(str(each.get("content")).encode()) for each in messages if isinstance(each, dict))
