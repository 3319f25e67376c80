"""From files to what the trainers learn from. All is read, checked and tokenised once, before any process starts.

A trainer visits what was read in the order of `data.prompt_mixture.MixtureCursor(report.prompt_files(), weights,
batch_size, shuffle, seed)`: positions, epoch after epoch, which resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.data.example_reader import FileReader, ReadRow, Totals
from megatron_rl.data.examples import Example, Labelled, Ranking, RowPlace, ScoredExample
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.reading_report import ReadingReport
from megatron_rl.data.row_problems import refuse, write_bad_rows
from megatron_rl.data.tokens import Tokens

Record = TypeVar("Record")


def read_examples(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Example], ReadingReport]:
    """For `sft`: conversations, questions with answers, or plain text, parquet or jsonl.

    One row becomes one example, or several where the template writes earlier turns otherwise once later ones follow
    (such as without their thinking): then each answer is learned as it is generated, and the examples share `where`.

    Raises ConfigError for files that cannot be read or have no columns for this, columns that could mean two things,
    files of different schemas, bad rows unless `options.bad_rows` is "skip", and if nothing is left.
    """

    def records(row: ReadRow) -> Iterable[Example]:
        return (_example(one, row.place) for texts in row.texts for one in texts)

    return _read(files, tokenizer, options, "examples", records)


def read_rankings(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Ranking], ReadingReport]:
    """For `reward` and `dpo`: chosen and rejected answers, with the prompt apart or in both, or several ranked answers.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[Ranking]:
        answers = tuple(_example(one, row.place) for (one,) in row.texts)
        yield Ranking(answers, row.row.margins, row.place)

    return _read(files, tokenizer, options, "rankings", records)


def read_labelled(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Labelled], ReadingReport]:
    """For KTO: answers with a label; of a file of preferences, the chosen answer as desirable, then the rejected one.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[Labelled]:
        for (one,), desirable in zip(row.texts, row.row.desirable, strict=True):
            yield Labelled(_example(one, row.place), desirable, row.place)

    return _read(files, tokenizer, options, "labelled", records)


def read_scored(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[ScoredExample], ReadingReport]:
    """For `reward` by regression: answers with a score.

    Raises ConfigError as `read_examples`.
    """

    def records(row: ReadRow) -> Iterable[ScoredExample]:
        score = row.row.score
        assert score is not None  # the reader of rows has seen to it
        yield ScoredExample(_example(row.texts[0][0], row.place), score, row.place)

    return _read(files, tokenizer, options, "scored", records)


def _read(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: ReadingOptions,
    stage: str,
    records: Callable[[ReadRow], Iterable[Record]],
) -> tuple[list[Record], ReadingReport]:
    read, found = [], []
    with closing(FileReader(tokenizer, options, stage)) as reader:
        for path in files:
            rows = reader.read(path)
            own = [record for row in rows for record in records(row)]
            read.append(reader.facts(path, rows, len(own)))
            found += own
    totals: Totals = reader.totals
    num_rows = sum(one.num_rows for one in read)
    if options.bad_rows_file is not None:
        write_bad_rows(options.bad_rows_file, totals.bad_rows)
    if options.bad_rows == "error" or not found:
        refuse(totals.bad_rows, num_rows)
    if not found:
        reader.refuse_nothing(num_rows)
    return found, ReadingReport(
        tuple(read),
        tuple(totals.bad_rows),
        totals.truncated,
        totals.dropped,
        totals.num_tokens,
        totals.num_counted,
        totals.notes(),
    )


def _example(tokens: Tokens, place: RowPlace) -> Example:
    mask = torch.tensor(tokens.counts, dtype=torch.bool)
    return Example(torch.tensor(tokens.ids, dtype=torch.int64), mask, place, tokens.prompt_length)
