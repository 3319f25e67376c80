"""Example files as the records that sft, reward and dpo train on: responses as tokens, alone, ranked, labelled, scored.

All is read, checked and tokenised once, before any process starts. A trainer visits the records in the order of
`prompt_mixture.MixtureCursor(report.prompt_files(), weights, batch_size, shuffle, seed)`, which resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.data.example_reader import FileRead, FileReader, ReadingReport, ReadRow
from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.data.prompt_mixture import digest_of, digest_of_tokens, digest_of_values
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_files import chosen_rows
from megatron_rl.data.row_problems import RowPlace, refuse, write_bad_rows
from megatron_rl.data.tokens import Tokens
from megatron_rl.errors import ConfigError
from megatron_rl.images import Pieces, pieces_between
from megatron_rl.records import Batch, ragged

Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class Example:
    """A text and the tokens in it that are learned.

    tokens: int64 [L], L >= 1. loss_mask: bool [L]; True: the loss has the cross-entropy of this token, given the tokens
    before it; the first is False, as no token precedes it. prompt_length: tokens before the first response that counts;
    0 without a prompt, and if the prompt counts, too. where: the row of the file. images: whose placeholders are among
    the tokens.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    where: RowPlace
    prompt_length: int = 0
    images: Pieces = ()

    @property
    def num_counted(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, eq=False)
class Ranking:
    """Responses to one prompt, the best first; a pair of chosen and rejected is a ranking of two.

    answers: at least 2; their first `prompt_length` tokens are equal, and only tokens after them count. margins: how
    much better each response is than the next one, one number fewer than there are responses, each at least 0; 0 if the
    file has none. The margin between any two responses is the sum of those in between (`margin`).
    """

    answers: tuple[Example, ...]
    margins: tuple[float, ...]
    where: RowPlace

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, with which all responses begin."""
        return self.answers[0].prompt_length

    def margin(self, better: int, worse: int) -> float:
        """How much better response `better` is than response `worse`, with better < worse."""
        return sum(self.margins[better:worse])


@dataclass(frozen=True, eq=False)
class Labelled:
    """A response and whether it is desirable (KTO)."""

    example: Example
    desirable: bool
    where: RowPlace


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """A response and its score, which a reward model learns to give at the last token."""

    example: Example
    score: float
    where: RowPlace


def token_batch(examples: Sequence[Example]) -> Batch:
    """The batch of which cross-entropy is computed: the tokens of each example up to the last that counts, and
    `images` if some of them show images.

    Raises ValueError for an example without a token that counts.
    """
    rows, masks, images = [], [], list[Pieces]()
    for example in examples:
        counted = example.loss_mask.nonzero()[:, 0]
        if not len(counted):
            raise ValueError(f"{example.where}: no token counts in the loss")
        end = int(counted[-1]) + 1
        rows.append(example.tokens[:end])
        masks.append(example.loss_mask[:end])
        images.append(pieces_between(example.images, 0, end))
    shown = {"images": images} if any(images) else {}
    return Batch(input_ids=ragged(rows), sampled=ragged(masks), **shown)


def read_examples(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    images: PromptImages | None = None,
) -> tuple[list[Example], ReadingReport]:
    """Read conversations, questions with responses, or plain text for `sft`, parquet or jsonl.

    One row becomes one example, or several if the template rewrites earlier turns once later ones follow (such as
    without their thinking): then each response is learned as it is generated, and the examples share `where`.

    Raises ConfigError for files that cannot be read or do not have the columns, columns that could mean two things,
    files of different schemas, bad rows unless `options.bad_rows` is "skip", and if nothing is left.
    """

    def records(row: ReadRow) -> Iterable[Example]:
        return (_example(text, row.place) for texts in row.texts for text in texts)

    return _read(files, tokenizer, options, "examples", records, images)


def read_rankings(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    images: PromptImages | None = None,
) -> tuple[list[Ranking], ReadingReport]:
    """Read preferences for `reward` and `dpo`: chosen and rejected responses, with the prompt apart or in both, or
    ranked responses.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[Ranking]:
        answers = tuple(_example(text, row.place) for (text,) in row.texts)
        yield Ranking(answers, row.row.margins, row.place)

    return _read(files, tokenizer, options, "rankings", records, images)


def read_labelled(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    images: PromptImages | None = None,
) -> tuple[list[Labelled], ReadingReport]:
    """Read responses with a label for KTO. A pair becomes two records: the chosen response, desirable, then the
    rejected.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[Labelled]:
        for (text,), desirable in zip(row.texts, row.row.desirable, strict=True):
            yield Labelled(_example(text, row.place), desirable, row.place)

    return _read(files, tokenizer, options, "labelled", records, images)


def read_scored(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    images: PromptImages | None = None,
) -> tuple[list[ScoredExample], ReadingReport]:
    """Read responses with a score, for `reward` by regression.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[ScoredExample]:
        score = row.row.score
        assert score is not None  # `RowReader` refuses a row without one
        yield ScoredExample(_example(row.texts[0][0], row.place), score, row.place)

    return _read(files, tokenizer, options, "scored", records, images)


def _read(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    kind: str,
    records_of: Callable[[ReadRow], Iterable[Record]],
    images: PromptImages | None = None,
) -> tuple[list[Record], ReadingReport]:
    records: list[Record] = []
    with closing(FileReader(tokenizer, options, kind, images)) as reader:
        report = reader.report
        for path, file_rows in zip(files, chosen_rows(files, options.max_samples, options.seed), strict=True):
            detected, num_rows, rows = reader.read(path, file_rows)
            own = [record for row in rows for record in records_of(row)]
            report.files.append(FileRead(path, detected, num_rows, len(own), _digests(rows)))
            records += own
    num_rows = sum(file.num_rows for file in report.files)
    if options.bad_rows_file is not None:
        write_bad_rows(options.bad_rows_file, report.bad_rows)
    if options.bad_rows == "error" or not records:
        refuse(report.bad_rows, num_rows)
    if not records:
        raise ConfigError(
            f"none of {num_rows} rows is left: {report.dropped} have more than data.max_length="
            f"{options.max_length} tokens and data.truncation=drop; raise data.max_length"
        )
    return records, report


def _example(tokens: Tokens, place: RowPlace) -> Example:
    mask = torch.tensor(tokens.counts, dtype=torch.bool)
    return Example(torch.tensor(tokens.ids, dtype=torch.int64), mask, place, tokens.prompt_length, tokens.images)


def _digests(rows: Sequence[ReadRow]) -> dict[str, str]:
    """Name of what is compared when a run resumes -> a digest of it over these rows, in order."""
    texts = [text for row in rows for texts in row.texts for text in texts]
    shown = [[piece.digest for piece in text.images] for text in texts]
    images = {"images": digest_of_values(shown)} if any(shown) else {}
    return images | {
        "tokens": digest_of_tokens(text.ids for text in texts),
        "loss masks": digest_of(bytes(text.counts) for text in texts),
        "margins, labels and scores": digest_of_values(
            (row.row.margins, row.row.desirable, row.row.score) for row in rows
        ),
    }
