"""Reads files of one schema, row by row, into tokens, and keeps count of what became of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.chat_template import ChatTemplate, Draft, plain_draft
from megatron_rl.data.example_rows import Chat, ExampleRow, RowReader, Text
from megatron_rl.data.examples import RowPlace
from megatron_rl.data.lengths import fitted
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.reading_report import FileRead
from megatron_rl.data.row_files import column_forms, read_raw
from megatron_rl.data.row_problems import BadRow, RowProblem, refuse
from megatron_rl.data.schemas import Columns, find_columns
from megatron_rl.data.template_process import TemplateProcess, TemplateRefusal
from megatron_rl.data.tokens import Encoder, Tokens
from megatron_rl.errors import ConfigError

Answers = tuple[Text | Chat, ...]
Drafted = tuple[RowPlace, ExampleRow, list[list[Draft]]]

ROWS_AT_ONCE = 2048
"""Tokenizers are fast at many texts."""


@dataclass(frozen=True)
class ReadRow:
    """A row as tokens. texts: for each answer of `row` one, or several where the template rewrites earlier turns."""

    place: RowPlace
    row: ExampleRow
    texts: list[list[Tokens]]


@dataclass
class Totals:
    """What became of all rows so far; the last four count texts."""

    bad_rows: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    num_tokens: int = 0
    num_counted: int = 0
    split: int = 0
    ended: int = 0
    altered: int = 0
    rewritten: int = 0

    def notes(self) -> tuple[str, ...]:
        """What a reader of a run's output should know, in sentences."""
        told = {
            f"{self.ended} answers got the end token, as nothing else ended them (data.append_eos)": self.ended,
            f"{self.rewritten} rows became several texts, as the chat_template rewrites earlier turns": self.rewritten,
            f"{self.altered} answers stand otherwise in the chat_template than in their file": self.altered,
            f"{self.split} answers begin or end inside a token: prompt and answer were tokenised apart": self.split,
        }
        return tuple(text for text, count in told.items() if count)


class FileReader:
    """Of one stage of `schemas.STAGES`; all files must have the same columns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ReadingOptions, stage: str):
        """Raises ConfigError for options that do not go with the stage."""
        if stage != "examples" and options.loss_on == "all":
            raise ConfigError(
                "data.loss_on=all is for supervised fine-tuning: preferences and scores are of answers; "
                "nearest: data.loss_on=answers"
            )
        self.totals = Totals()
        self._tokenizer = tokenizer
        self._options = options
        self._stage = stage
        self._encoder = Encoder(tokenizer, options.append_eos)
        self._process: TemplateProcess[Answers, list[list[Draft]] | RowProblem] | None = None
        self._first: tuple[str, Columns] | None = None
        self._num_rows: dict[str, int] = {}
        self._detected: dict[str, str] = {}

    def read(self, path: str) -> list[ReadRow]:
        """The rows of a file that can be used; the others are counted and, where bad, named in `totals`.

        Raises ConfigError for a file that cannot be read, or not like those before it.
        """
        columns = self._columns(path)
        as_chat = self._as_chat(columns)
        raw = read_raw(path, tuple(columns.names.values()))
        reader = RowReader(columns, self._stage, as_chat)
        self._num_rows[path] = raw.num_rows
        self._detected[path] = str(columns) + (", a prompt becomes a user's message" if as_chat else "")
        bad_rows = list(raw.bad_rows)
        found: list[ReadRow] = []
        rows = iter(raw.rows)
        while some := list(islice(rows, ROWS_AT_ONCE)):
            checked: list[tuple[RowPlace, ExampleRow]] = []
            for place, content in some:
                try:
                    checked.append((place, reader.read(content)))
                except RowProblem as problem:
                    bad_rows.append(problem.at(place))
            found += self._encoded(self._drafted(checked, bad_rows), bad_rows)
        self.totals.bad_rows += sorted(bad_rows, key=lambda one: one.place.row)
        return found

    def close(self) -> None:
        """End the process that renders conversations, if there is one."""
        if self._process is not None:
            self._process.close()

    def facts(self, path: str, rows: Sequence[ReadRow], num_records: int) -> FileRead:
        """What the report says of a file that `read` has read."""
        return FileRead(path, self._detected[path], self._num_rows[path], num_records, _digests(rows))

    def refuse_nothing(self, num_rows: int) -> None:
        """Raise the ConfigError for files of which no row was bad and yet none is left."""
        raise ConfigError(
            f"none of {num_rows} rows is left: {self.totals.dropped} have more than data.max_length="
            f"{self._options.max_length} tokens and data.truncation=drop; raise data.max_length"
        )

    def _columns(self, path: str) -> Columns:
        forms = column_forms(path)
        if not forms:
            raw = read_raw(path, ())
            refuse(raw.bad_rows, raw.num_rows)
        columns = find_columns(path, forms, self._options, self._stage)
        if self._first is None:
            self._first = (path, columns)
        first_path, first = self._first
        if columns != first:
            raise ConfigError(
                f"files of different schemas: {first_path} has {first}, {path} has {columns}; give files of one "
                "schema, or name the columns that all of them have by their keys, such as data.prompt_key"
            )
        return columns

    def _as_chat(self, columns: Columns) -> bool:
        if columns.shape in ("conversation", "text"):
            return False
        if self._options.prompt_as_chat is not None:
            return self._options.prompt_as_chat
        is_trl = columns.shape != "answer" or columns.names["response"] == "completion"
        return not is_trl and self._tokenizer.chat_template is not None

    def _drafted(self, rows: Sequence[tuple[RowPlace, ExampleRow]], bad_rows: list[BadRow]) -> list[Drafted]:
        """Rows with their texts. Raises ConfigError for a row that takes the template too much time or memory, also
        where bad rows are skipped: the others may take as much.
        """
        drafted = []
        try:
            texts = self._texts([row.answers for _, row in rows])
        except TemplateRefusal as refusal:
            place, _ = rows[refusal.number]
            raise ConfigError(str(BadRow("template_refuses", place, "", str(refusal)))) from None
        for (place, row), own in zip(rows, texts, strict=True):
            if isinstance(own, RowProblem):
                bad_rows.append(own.at(place))
            else:
                drafted.append((place, row, own))
        return drafted

    def _texts(self, rows: Sequence[Answers]) -> list[list[list[Draft]] | RowProblem]:
        """What `drafts_of_answers` says of each row, in a process of the template's where there are conversations."""
        if self._process is None:
            how = self._options.loss_on, self._stage == "examples"
            if not any(isinstance(answer, Chat) for answers in rows for answer in answers):
                return drafts_of_rows(None, *how, rows)
            template = ChatTemplate(self._tokenizer, self._options.apply_chat_template_kwargs)
            self._process = TemplateProcess(partial(drafts_of_rows, template, *how))
        return self._process.map(rows)

    def _encoded(self, drafted: Sequence[Drafted], bad_rows: list[BadRow]) -> Iterator[ReadRow]:
        drafts = [draft for _, _, answers in drafted for texts in answers for draft in texts]
        encoded = iter(self._encoder.encode(drafts))
        for place, row, answers in drafted:
            texts = [[next(encoded) for _ in own] for own in answers]
            try:
                kept = self._fitted(texts)
            except RowProblem as problem:
                bad_rows.append(problem.at(place))
                continue
            if not any(kept):
                continue
            self._count([one for own in answers for one in own], [one for own in kept for one in own])
            self.totals.rewritten += max(len(own) for own in texts) > 1
            yield ReadRow(place, row, kept)

    def _fitted(self, texts: list[list[Tokens]]) -> list[list[Tokens]]:
        """The texts of one row within `max_length`, counted. Raises RowProblem."""
        if len(texts) == 1:
            kept, cut, dropped = fitted(texts[0], self._options, shares_prompt=False)
            whole = [kept]
        else:
            answers, cut, dropped = fitted(
                _with_one_prompt([one for (one,) in texts]), self._options, shares_prompt=True
            )
            whole = [[one] for one in answers]
        self.totals.dropped += dropped > 0 and not any(whole)
        self.totals.truncated += cut > 0 or (dropped > 0 and any(whole))
        return whole

    def _count(self, drafts: Iterable[Draft], texts: Iterable[Tokens]) -> None:
        totals = self.totals
        for draft in drafts:
            totals.ended += draft.is_open and self._options.append_eos
            totals.altered += draft.is_altered
        for one in texts:
            totals.split += one.is_split
            totals.num_tokens += len(one.ids)
            totals.num_counted += sum(one.counts)


def drafts_of_rows(
    template: ChatTemplate | None, loss_on: str, may_be_several: bool, rows: Sequence[Answers]
) -> list[list[list[Draft]] | RowProblem]:
    """What `drafts_of_answers` says of each row."""
    return [drafts_of_answers(template, loss_on, may_be_several, answers) for answers in rows]


def drafts_of_answers(
    template: ChatTemplate | None, loss_on: str, may_be_several: bool, answers: Answers
) -> list[list[Draft]] | RowProblem:
    """The texts of each answer of a row, or what is wrong with it. template: None where all answers are plain text.

    may_be_several: whether an answer of several turns may become as many texts.
    """
    found = []
    try:
        for answer in answers:
            if isinstance(answer, Text) or template is None:
                found.append([plain_draft(answer, loss_on)])  # type: ignore[arg-type]  # else it is a Text
                continue
            drafts = template.drafts(answer, loss_on)
            if len(drafts) > 1 and not may_be_several:
                raise RowProblem("template_rewrites", "", "an answer of several turns, of which it rewrites the first")
            found.append(drafts)
    except RowProblem as problem:
        return problem
    return found


def _with_one_prompt(answers: list[Tokens]) -> list[Tokens]:
    """The answers with the same `prompt_length`: tokens that all of them begin with."""
    most = min(one.prompt_length for one in answers)
    first = answers[0].ids
    shared = next((n for n in range(most) if any(one.ids[n] != first[n] for one in answers)), most)
    return [replace(one, prompt_length=shared) for one in answers]


def _digests(rows: Sequence[ReadRow]) -> dict[str, str]:
    """What is compared when a run goes on -> a digest of it, in order."""
    digests = {name: hashlib.sha256() for name in ("tokens", "loss masks", "margins, labels and scores")}
    for row in rows:
        for one in (one for texts in row.texts for one in texts):
            digests["tokens"].update(array("q", [len(one.ids), *one.ids]).tobytes())
            digests["loss masks"].update(bytes(one.counts))
        judged = (row.row.margins, row.row.desirable, row.row.score)
        digests["margins, labels and scores"].update(f"{judged!r}\n".encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}
