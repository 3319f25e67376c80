"""Prompt files as rows of a `Batch` without responses. All rows are checked and tokenised once, as files are opened.

A row has the prompt (`data.prompt_key`: chat messages or a string), the data source (`data.reward_fn_key`, or
`data.default_data_source`), the expected answer (`data.ground_truth_key`), and perhaps `extra_info`. The defaults of
these keys are verl's schema.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.schema import DataConfig
from megatron_rl.config.synonyms import PROMPTS, SOURCES, TRUTHS, suggested_column
from megatron_rl.data.messages import Message
from megatron_rl.data.prompt_images import IMAGE_COLUMNS, PromptImages, StoredImage, cut_whole
from megatron_rl.data.prompt_mixture import PromptFile, digest_of_tokens, digest_of_values
from megatron_rl.data.row_files import (
    ALL_ROWS,
    FileRows,
    Row,
    chosen_rows,
    column_forms,
    needed_value,
    read_rows,
    value_of,
)
from megatron_rl.data.row_problems import BadRow, RowPlace, RowProblem, refuse
from megatron_rl.data.template_process import Renderer, TemplateRefusal
from megatron_rl.errors import ConfigError
from megatron_rl.images import Pieces
from megatron_rl.records import Batch, Conversation, ragged_from_lengths

TOKENIZER_ARGUMENTS = {"padding", "truncation", "max_length"}
"""Arguments of `apply_chat_template` that are the tokenizer's, and not the template's."""


Located = tuple[RowPlace, Conversation]


class PromptDataset:
    """The usable prompts of some files, file after file: those that are short enough or were cut.

    files: path, usable prompts and digests of each file, for the order in which they are visited.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data_config: DataConfig,
        is_judged: bool = True,
        keeps_text: bool = False,
        vocab_size: int | None = None,
        max_samples: int = -1,
        images: PromptImages | None = None,
    ):
        """Read and tokenise; see `DataConfig` for the columns, for templates and for prompts that are too long.

        is_judged: whether a reward function scores the responses: then every row must have a data source and a ground
        truth. keeps_text: whether batches have `raw_prompt`, too. vocab_size: tokens that the model has; None: any may
        occur. max_samples: rows to use, at most; -1: all. images: reads those of prompts, which then have a column of
        them; None: prompts are text.

        Raises ConfigError for a missing or unreadable file, missing or empty columns, an empty dataset, and prompts
        that cannot be tokenised or are too long.
        """
        self.files: list[PromptFile] = []
        self.images = images
        self.keeps_text = keeps_text
        parts, offset = [], 0
        seed = data_config.seed if data_config.shuffle else None
        for path, file_rows in zip(paths, chosen_rows(paths, max_samples, seed), strict=True):
            places, rows = read_prompts(path, data_config, is_judged, file_rows, images)
            located = list(zip(places, rows.objects("raw_prompt"), strict=True))
            prompt_ids = tokenise(path, located, tokenizer, data_config)
            pieces: list[Pieces] = [()] * len(places)
            if images is not None:
                stored = rows.objects("images")
                prompt_ids, pieces = images.all_written_out(places, prompt_ids, stored, data_config.prompt_key)
            refuse_unusable_tokens(places, prompt_ids, data_config.prompt_key, vocab_size)
            usable = short_enough(path, places, prompt_ids, data_config)
            prompts = rows[torch.tensor(usable, dtype=torch.int64)]
            numbers, whole = [places[row].row for row in usable], [(prompt_ids[row], pieces[row]) for row in usable]
            ids, shown = map(list, zip(*(cut(*row, data_config) for row in whole), strict=True))
            prompts.add(index=offset + torch.tensor(numbers, dtype=torch.int64), input_ids=_ragged(ids))
            if images is not None:
                prompts.add(images=shown)
            self.files.append(PromptFile(path, len(usable), _digests(prompts, ids)))
            parts.append(prompts)
            offset += len(places) if file_rows.chosen is None else file_rows.num_rows
        self._rows = Batch.joined(parts)

    def __len__(self) -> int:
        """The number of usable prompts."""
        return len(self._rows)

    @property
    def data_sources(self) -> set[str]:
        """The data sources of all prompts."""
        return set(self._rows.objects("data_source"))

    @property
    def are_chats(self) -> set[bool]:
        """Whether its prompts are messages, whether they are texts, or both."""
        return {not isinstance(prompt, str) for prompt in self._rows.objects("raw_prompt")}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict for each prompt, with index, data_source, ground_truth and extra_info."""
        names = ("index", "data_source", "ground_truth", "extra_info")
        columns = (self._rows["index"].tolist(), *map(self._rows.objects, names[1:]))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def texts(self, data_sources: Collection[str] | None = None) -> tuple[list[Conversation], list[list[int]]]:
        """The prompts of these data sources, or of all, as their files have them, and their tokens."""
        kept = self._of_sources(data_sources)
        return kept.objects("raw_prompt"), [ids.tolist() for ids in kept["input_ids"].unbind()] if len(kept) else []

    def _of_sources(self, data_sources: Collection[str] | None) -> Batch:
        """The prompts of these data sources, or of all."""
        sources = enumerate(self._rows.objects("data_source"))
        kept = [row for row, source in sources if data_sources is None or source in data_sources]
        return self._rows[torch.tensor(kept, dtype=torch.int64)]

    def prompts_at(
        self,
        key: tuple[str, str],
        most: tuple[str, int],
        tokenizer: PreTrainedTokenizerBase,
        data_config: DataConfig,
        data_sources: Collection[str] | None = None,
    ) -> dict[int, torch.Tensor]:
        """Number of each prompt of these data sources, or of all, -> tokens of the prompt in an entry of extra_info.

        key, most: names of the keys that set the entry and its tokens at most, with their values. Raises ConfigError
        for a missing or too long one, and as `tokenise`.
        """
        (key_name, name), (most_name, limit) = key, most
        kept = self._of_sources(data_sources)
        numbers = kept["index"].tolist()
        sent = [info.get(name) for info in kept.objects("extra_info")]
        if lacking := [number for number, prompt in zip(numbers, sent, strict=True) if not prompt]:
            raise ConfigError(
                f"{key_name}={name} must be an entry of extra_info of every prompt that is taught, and "
                f"{len(lacking)} of {len(kept)} do not have it; the first is row {lacking[0]}"
            )
        asked = [(RowPlace(key_name, number), as_sent(p, data_config)) for number, p in zip(numbers, sent, strict=True)]
        token_ids = tokenise(f"extra_info.{name}", asked, tokenizer, data_config)
        if long := [number for number, ids in zip(numbers, token_ids, strict=True) if len(ids) > limit]:
            longest = max(map(len, token_ids))
            raise ConfigError(
                f"{most_name}={limit} must be at least {longest}, the tokens of the longest one in extra_info.{name}; "
                f"{len(long)} of {len(kept)} are longer, the first is row {long[0]}; try: {most_name}={longest}"
            )
        return {number: torch.tensor(ids) for number, ids in zip(numbers, token_ids, strict=True)}

    def places(self, numbers: Sequence[int]) -> list[int | None]:
        """The argument of `batch` for each row number over all files (column `index`); None for a row that is none of
        the usable prompts.
        """
        places = {number: place for place, number in enumerate(self._rows["index"].tolist())}
        return [places.get(number) for number in numbers]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The prompts at `indices` (each in [0, len(self)), at least one) as B = len(indices) rows without a response.

        `index` is the row number over all files, which filtering does not change; `sample` is 0. Every row is a group.
        """
        prompts = self._rows[torch.tensor(indices, dtype=torch.int64)]
        prompts.add(sample=torch.zeros(len(indices), dtype=torch.int64), uid=torch.arange(len(indices)))
        return prompts if self.keeps_text else prompts.without("raw_prompt")


def read_prompts(
    path: str,
    data: DataConfig,
    is_judged: bool = True,
    file_rows: FileRows = ALL_ROWS,
    images: PromptImages | None = None,
) -> tuple[list[RowPlace], Batch]:
    """The places and the prompts of a parquet or jsonl file, without tokens.

    is_judged: whether every row must have a data source and a ground truth; else the file's name stands for the one,
    and the other may be None. file_rows: the rows to use. images: reads those of rows, which are then a column of
    `StoredImage`s.

    Raises ConfigError for a missing, unreadable, damaged or empty file, for a missing column, and for bad rows, which
    it names.
    """
    _check_columns(path, data, is_judged, images)
    truth, usual_source = data.ground_truth_key, data.default_data_source or (None if is_judged else Path(path).stem)
    columns = (data.prompt_key, data.reward_fn_key, "extra_info", *(() if truth is None else (truth,)))
    columns += () if images is None else (images.column,)

    def read(content: Row) -> tuple[Conversation, str, Any, dict[str, Any], tuple[StoredImage, ...]]:
        prompt, source = needed_value(content, data.prompt_key), value_of(content, data.reward_fn_key)
        if source is None:
            source = usual_source or needed_value(content, data.reward_fn_key)
        ground_truth = None if truth is None else (needed_value if is_judged else value_of)(content, truth)
        extra_info = content.get("extra_info") or {}
        if not isinstance(extra_info, dict):
            raise RowProblem("wrong_type", "extra_info", f"a {type(extra_info).__name__}, and not an object")
        _check_prompt(prompt, data.prompt_key)
        sent, stored = as_sent(prompt, data), tuple[StoredImage, ...]()
        if images is not None:
            sent, stored = images.of_row(sent, data.prompt_key, value_of(content, images.column))
        return sent, str(source), ground_truth, extra_info, stored

    rows, bad_rows = read_rows(path, columns, read, file_rows, None if images is None else images.column)
    if images is not None:
        bad_rows += images.problems([(place, row[-1]) for place, row in rows])
    refuse(bad_rows, len({row.place for row in bad_rows} | {place for place, _ in rows}), can_be_skipped=False)
    names = ("raw_prompt", "data_source", "ground_truth", "extra_info", *(() if images is None else ("images",)))
    values = {name: [row[number] for _, row in rows] for number, name in enumerate(names)}
    return [place for place, _ in rows], Batch(**values)


def untemplated_notes(are_chats: Collection[bool], tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> list[str]:
    """Return a sentence where prompts are text and the model has a chat template that nobody has decided about.

    are_chats: see `PromptDataset`.
    """
    if False not in are_chats or tokenizer.chat_template is None or data.prompt_as_chat is not None:
        return []
    return [
        "note: prompts that are text are sent as they are, without the model's chat template; data.prompt_as_chat=true "
        "sends each as a user's message of the template, and data.prompt_as_chat=false keeps the text and removes this "
        "note"
    ]


def as_sent(prompt: Conversation, data: DataConfig) -> Conversation:
    """Return a prompt as it goes to the policy: with `data.prompt_as_chat` a text becomes a user's message."""
    is_text = isinstance(prompt, str)
    return [{"role": "user", "content": prompt}] if is_text and data.prompt_as_chat else prompt


def _check_columns(path: str, data: DataConfig, is_judged: bool, images: PromptImages | None) -> None:
    forms = column_forms(path, first_row_only=True)
    if images is not None and images.is_optional and images.column not in forms:
        images.files_without.append(path)
        data = replace(data, image_key=None)
    wanted: list[tuple[str, str, Sequence[str]]] = [("data.prompt_key", data.prompt_key, PROMPTS)]
    if data.image_key is not None:
        wanted.append(("data.image_key", data.image_key, IMAGE_COLUMNS))
    if is_judged and data.default_data_source is None:
        wanted.append(("data.reward_fn_key", data.reward_fn_key, SOURCES))
    if is_judged and data.ground_truth_key is not None:
        wanted.append(("data.ground_truth_key", data.ground_truth_key, TRUTHS))
    for key, column, usual in wanted:
        if column not in forms:
            like = suggested_column(column, usual, list(forms))
            hint = "none is like it" if like is None else f"did you mean: {like}"
            if key == "data.reward_fn_key":
                hint += "; data.default_data_source names the source of rows that have none"
            raise ConfigError(f"{path} has no column {column!r} ({key}): its columns are {', '.join(forms)}; {hint}")


def _check_prompt(prompt: object, field: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise RowProblem("wrong_type", field, f"{prompt!r:.80}, and not text or messages")
    for number, message in enumerate(prompt):
        for name in ("role", "content"):
            if message.get(name) is None:
                raise RowProblem("not_a_message", f"{field}[{number}].{name}", f"no {name}")


def tokenise(
    path: str, prompts: Sequence[Located], tokenizer: PreTrainedTokenizerBase, data_config: DataConfig
) -> list[list[int]]:
    """Token ids per prompt: strings are encoded as they are, messages through the chat template. Raises ConfigError
    if the tokenizer has no template, and for a prompt that the template refuses.
    """
    texts = [prompt for _, prompt in prompts if isinstance(prompt, str)]
    chats = [(place, prompt) for place, prompt in prompts if not isinstance(prompt, str)]
    if chats and tokenizer.chat_template is None:
        way_out = (
            "set data.prompt_as_chat=false" if data_config.prompt_as_chat else "store the prompts as plain strings"
        )
        raise ConfigError(
            f"the prompts of {path} are chat messages, but the tokenizer has no chat_template: "
            f"add one to the model folder, or {way_out}"
        )
    # All at once, which is what tokenizers are fast at.
    of_texts = iter(tokenizer(texts)["input_ids"] if texts else ())
    of_chats = iter(_apply_template(chats, tokenizer, data_config) if chats else ())
    return [next(of_texts if isinstance(prompt, str) else of_chats) for _, prompt in prompts]


def _apply_template(
    chats: Sequence[tuple[RowPlace, list[Message]]], tokenizer: PreTrainedTokenizerBase, data_config: DataConfig
) -> list[list[int]]:
    options = {"add_generation_prompt": True} | data_config.apply_chat_template_kwargs
    arguments = {name: options.pop(name) for name in TOKENIZER_ARGUMENTS & options.keys()}
    arguments |= options.pop("tokenizer_kwargs", {})
    with closing(Renderer(tokenizer, options)) as template:
        try:
            texts = template.texts([prompt for _, prompt in chats])
        except TemplateRefusal as refusal:
            place, _ = chats[refusal.number]
            raise ConfigError(str(BadRow("template_refuses", place, data_config.prompt_key, str(refusal)))) from None
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, **arguments)["input_ids"]
    return encoded


def refuse_unusable_tokens(
    places: Sequence[RowPlace], prompt_ids: Sequence[Sequence[int]], prompt_key: str, vocab_size: int | None
) -> None:
    """Raise ConfigError for prompts without tokens, and with tokens that the model does not have: a tokenizer may have
    more, which are added to it.
    """
    bad_rows = []
    for place, ids in zip(places, prompt_ids, strict=True):
        if not ids:
            bad_rows.append(BadRow("empty_prompt", place, prompt_key, "0 tokens"))
        elif vocab_size is not None and max(ids) >= vocab_size:
            found = f"token {max(ids)}, and the model has {vocab_size}"
            bad_rows.append(BadRow("unknown_token", place, prompt_key, found))
    refuse(bad_rows, len(places), can_be_skipped=False)


def short_enough(
    path: str, places: Sequence[RowPlace], prompt_ids: Sequence[list[int]], data_config: DataConfig
) -> list[int]:
    """The numbers of the prompts to use, among `prompt_ids`. Raises ConfigError for a prompt that is too long and may
    be neither dropped nor cut, and if all would be dropped.
    """
    limit = data_config.max_prompt_length
    found = list(range(len(prompt_ids)))
    kept = [number for number in found if len(prompt_ids[number]) <= limit]
    if len(kept) == len(found):
        return found
    counted = f"{len(found) - len(kept)} of {len(found)} prompts of {path}"
    if not data_config.filter_overlong_prompts:
        if data_config.truncation != "error":
            return found
        longest = max(found, key=lambda number: len(prompt_ids[number]))
        most = len(prompt_ids[longest])
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}; the longest has {most} "
            f"tokens (row {places[longest].row}): set data.max_prompt_length={most}, "
            "data.filter_overlong_prompts=true to drop them, or data.truncation=left, right or middle to cut them"
        )
    if not kept:
        shortest = min(map(len, prompt_ids))
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}, so none is left; the shortest has {shortest} "
            f"tokens: set data.max_prompt_length to {shortest} or more"
        )
    return kept


def cut(token_ids: Sequence[int], pieces: Pieces, data_config: DataConfig) -> tuple[list[int], Pieces]:
    """At most `max_prompt_length` tokens and their images: `truncation` names the side that loses some, "middle" keeps
    both ends. An image is kept or left out as a whole.
    """
    ids, limit = list(token_ids), data_config.max_prompt_length
    if len(ids) <= limit:
        return ids, pieces
    head = {"left": 0, "right": limit, "middle": limit // 2}[data_config.truncation]
    return cut_whole(ids, pieces, head, limit - head)


def _ragged(token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
    tokens = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64)
    return ragged_from_lengths(tokens, torch.tensor([len(ids) for ids in token_ids], dtype=torch.int64))


def _digests(prompts: Batch, token_ids: Sequence[Sequence[int]]) -> dict[str, str]:
    """Name of what is compared when a run resumes -> a digest of it over these prompts, in order."""
    columns = {"data sources": "data_source", "ground truths": "ground_truth", "extra_info": "extra_info"}
    values = {name: digest_of_values(prompts.objects(column)) for name, column in columns.items()}
    if "images" in prompts:
        values["images"] = digest_of_values([piece.digest for piece in row] for row in prompts.objects("images"))
    return {"tokens": digest_of_tokens(token_ids)} | values
