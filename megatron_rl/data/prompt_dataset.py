"""From prompt files to token records. Everything is checked and tokenised once, when the files are opened."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompt_files import Message, PromptRow, read_rows
from megatron_rl.data.prompt_mixture import PromptFile
from megatron_rl.data.template_process import Renderer, TemplateRefusal
from megatron_rl.errors import ConfigError
from megatron_rl.records import Conversation, Prompts, non_tensor, ragged

OF_TOKENS = {"padding", "truncation", "max_length"}
"""Arguments of `apply_chat_template` that are about tokens, and not the template's."""


@dataclass(frozen=True)
class Prompt:
    """index: row number over all files, filtered rows included."""

    index: int
    token_ids: torch.Tensor
    row: PromptRow


class PromptDataset:
    """The prompts of some files that are short enough to use, or were cut, file after file.

    files: what each contributes, for the order in which they are visited.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data_config: DataConfig,
        needs_ground_truth: bool = True,
        keeps_text: bool = False,
        vocab_size: int | None = None,
    ):
        """Read and tokenise; see `DataConfig` for the columns, for templates and for prompts that are too long.

        needs_ground_truth: whether every row must have one; else it is None where a row has none. keeps_text: whether
        batches have `raw_prompt`, too. vocab_size: tokens that the model has; None: any may occur.

        Raises ConfigError for a missing or unreadable file, missing or empty columns, an empty dataset, and prompts
        that cannot be tokenised or are too long.
        """
        self.files: list[PromptFile] = []
        self.keeps_text = keeps_text
        self._prompts: list[Prompt] = []
        offset = 0
        for path in paths:
            rows = read_rows(path, data_config, needs_ground_truth)
            prompt_ids = tokenise(path, rows, tokenizer, data_config)
            refuse_unknown_tokens(path, prompt_ids, vocab_size)
            kept = short_enough(path, prompt_ids, data_config)
            prompts = [Prompt(offset + row, torch.tensor(cut(prompt_ids[row], data_config)), rows[row]) for row in kept]
            self.files.append(PromptFile(path, len(prompts), _digests(prompts)))
            self._prompts += prompts
            offset += len(rows)

    def __len__(self) -> int:
        """Number of usable prompts."""
        return len(self._prompts)

    @property
    def data_sources(self) -> set[str]:
        """Every data source that occurs."""
        return {prompt.row.data_source for prompt in self._prompts}

    def texts(self, data_sources: Collection[str] | None = None) -> tuple[list[Conversation], list[list[int]]]:
        """Every prompt of these sources, or of all, as its file has it, and its tokens."""
        kept = [one for one in self._prompts if data_sources is None or one.row.data_source in data_sources]
        return [one.row.prompt for one in kept], [one.token_ids.tolist() for one in kept]

    def batch(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices` (each in [0, len(self)), at least one) as a record of B = len(indices) rows.

        `Prompts.index` is the row number over all files, which filtering does not change; `sample` is 0.
        """
        prompts = [self._prompts[i] for i in indices]
        return Prompts(
            index=torch.tensor([prompt.index for prompt in prompts]),
            sample=torch.zeros(len(indices), dtype=torch.int64),
            prompt_ids=ragged([prompt.token_ids for prompt in prompts]),
            data_source=non_tensor([prompt.row.data_source for prompt in prompts]),
            ground_truth=non_tensor([prompt.row.ground_truth for prompt in prompts]),
            extra_info=non_tensor([prompt.row.extra_info for prompt in prompts]),
            raw_prompt=non_tensor([prompt.row.prompt for prompt in prompts]) if self.keeps_text else None,
            batch_size=[len(indices)],
        )


def tokenise(
    path: str, rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, data_config: DataConfig
) -> list[list[int]]:
    """Token ids per row: strings are encoded as they are, chat messages through the chat template."""
    prompt_ids: list[list[int]] = [[] for _ in rows]
    texts = [number for number, row in enumerate(rows) if isinstance(row.prompt, str)]
    if texts:
        encoded = tokenizer([rows[number].prompt for number in texts])["input_ids"]
        for number, ids in zip(texts, encoded, strict=True):
            prompt_ids[number] = ids
    chats = [(number, row.prompt) for number, row in enumerate(rows) if not isinstance(row.prompt, str)]
    if chats and tokenizer.chat_template is None:
        raise ConfigError(
            f"the prompts of {path} are chat messages, but the tokenizer has no chat_template: "
            "add one to the model folder, or store the prompts as plain strings"
        )
    if chats:
        encoded = _apply_template(path, chats, tokenizer, data_config)
        for (number, _), ids in zip(chats, encoded, strict=True):
            prompt_ids[number] = ids
    for number, ids in enumerate(prompt_ids):
        if not ids:
            raise ConfigError(f"{path}: the prompt of row {number} has 0 tokens; it needs at least 1")
    return prompt_ids


def _apply_template(
    path: str, chats: Sequence[tuple[int, list[Message]]], tokenizer: PreTrainedTokenizerBase, data_config: DataConfig
) -> list[list[int]]:
    """Token ids of (row, messages) pairs, all at once, which is what tokenizers are fast at."""
    options = {"add_generation_prompt": True} | data_config.apply_chat_template_kwargs
    of_tokens = {name: options.pop(name) for name in OF_TOKENS & options.keys()}
    of_tokens |= options.pop("tokenizer_kwargs", {})
    with closing(Renderer(tokenizer, options)) as template:
        try:
            texts = template.texts([prompt for _, prompt in chats])
        except TemplateRefusal as refusal:
            row, _ = chats[refusal.number]
            raise ConfigError(
                f"the tokenizer's chat_template refuses a prompt of {path} (row {row}): {refusal}"
            ) from None
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, **of_tokens)["input_ids"]
    return encoded


def refuse_unknown_tokens(path: str, prompt_ids: Sequence[Sequence[int]], vocab_size: int | None) -> None:
    """Raise ConfigError for a token that the model does not have: a tokenizer may have more, which are added to it."""
    for row, ids in enumerate(prompt_ids):
        if vocab_size is not None and max(ids) >= vocab_size:
            raise ConfigError(
                f"{path}: the prompt of row {row} has token {max(ids)}, and the model has {vocab_size}: take the "
                "tokenizer's added tokens out of the prompt, or use a model that has them"
            )


def short_enough(path: str, prompt_ids: Sequence[Sequence[int]], data_config: DataConfig) -> list[int]:
    """Rows to use. Raises ConfigError for a prompt that is too long and may not be dropped or cut, or if all are."""
    limit = data_config.max_prompt_length
    rows = [row for row, ids in enumerate(prompt_ids) if len(ids) <= limit]
    if len(rows) == len(prompt_ids):
        return rows
    counted = f"{len(prompt_ids) - len(rows)} of {len(prompt_ids)} prompts of {path}"
    if not data_config.filter_overlong_prompts:
        if data_config.truncation != "error":
            return list(range(len(prompt_ids)))
        longest = max(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}; the longest has {len(prompt_ids[longest])} "
            f"tokens (row {longest}): set data.max_prompt_length={len(prompt_ids[longest])}, "
            "data.filter_overlong_prompts=true to drop them, or data.truncation=left, right or middle to cut them"
        )
    if not rows:
        shortest = min(len(ids) for ids in prompt_ids)
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}, so none is left; the shortest has {shortest} "
            f"tokens: set data.max_prompt_length to {shortest} or more"
        )
    return rows


def cut(token_ids: Sequence[int], data_config: DataConfig) -> list[int]:
    """At most `max_prompt_length` tokens: `truncation` names the side that loses some, "middle" keeps both ends."""
    ids, limit = list(token_ids), data_config.max_prompt_length
    if len(ids) <= limit:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[data_config.truncation]
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _digests(prompts: Sequence[Prompt]) -> dict[str, str]:
    """What is compared when a run goes on -> a digest of it, in order."""
    digests = {name: hashlib.sha256() for name in ("tokens", "data sources", "ground truths", "extra_info")}
    for prompt in prompts:
        row = prompt.row
        digests["tokens"].update(array("q", [len(prompt.token_ids), *prompt.token_ids.tolist()]).tobytes())
        told = {"data sources": row.data_source, "ground truths": row.ground_truth, "extra_info": row.extra_info}
        for name, value in told.items():
            digests[name].update(f"{value!r}\n".encode("utf-8", "backslashreplace"))
    return {name: digest.hexdigest() for name, digest in digests.items()}
