"""Reads example files of one schema into rows of tokens, and reports what the rows of each file became."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.chat_template import ChatTemplate, Draft, plain_draft
from megatron_rl.data.example_rows import Chat, ExampleRow, RowReader, Text
from megatron_rl.data.prompt_images import PromptImages, StoredImage
from megatron_rl.data.prompt_mixture import PromptFile
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_files import FileRows, column_forms, read_rows
from megatron_rl.data.row_problems import BadRow, RowPlace, RowProblem
from megatron_rl.data.schemas import Columns, find_columns
from megatron_rl.data.template_process import TemplateProcess, TemplateRefusal
from megatron_rl.data.tokens import Encoder, Tokens, fitted
from megatron_rl.errors import ConfigError

Answers = tuple[Text | Chat, ...]
Drafted = tuple[RowPlace, ExampleRow, list[list[Draft]]]

ROWS_AT_ONCE = 2048
"""Tokenizers are fast at many texts."""


@dataclass(frozen=True)
class FileRead:
    """One file. detected: its schema and columns, in words. num_records: records that its rows became. digests: as
    `PromptFile` has them.
    """

    path: str
    detected: str
    num_rows: int
    num_records: int
    digests: dict[str, str] = field(default_factory=dict)


@dataclass
class ReadingReport:
    """The counts of all files. Every row of a file is a bad row, dropped, or in the records.

    files: in the order given; their records lie end to end in what was read. bad_rows: rows that were skipped.
    truncated: rows that lost tokens. dropped: rows longer than `max_length` that `truncation=drop` left out.
    rewritten: rows that became several texts. num_tokens, num_counted: tokens, and those in the loss. ended, altered,
    split: texts, see `notes`. unwritten: field -> texts whose responses have it, and in which the template leaves it
    out.
    """

    files: list[FileRead] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    rewritten: int = 0
    num_tokens: int = 0
    num_counted: int = 0
    ended: int = 0
    altered: int = 0
    split: int = 0
    unwritten: Counter[str] = field(default_factory=Counter)

    def prompt_files(self) -> list[PromptFile]:
        """The files as `prompt_mixture.MixtureCursor` takes them, for an order that is seeded and resumable."""
        return [PromptFile(file.path, file.num_records, file.digests) for file in self.files]

    @property
    def notes(self) -> list[str]:
        """Sentences on what the tokenizer and the template did, for the user."""
        counts = {
            f"{self.ended} responses got the end token, as nothing else ended them (data.append_eos)": self.ended,
            f"{self.rewritten} rows became several texts, as the chat_template rewrites earlier turns": self.rewritten,
            f"{self.altered} responses are rendered differently by the chat_template than in their file": self.altered,
            f"{self.split} responses begin or end inside a token: prompt and response were tokenised "
            "separately": self.split,
        }
        left_out = [
            f"{count} texts have {name}, which the chat_template does not write: it is not learned"
            for name, count in sorted(self.unwritten.items())
        ]
        return [note for note, count in counts.items() if count] + left_out

    def lines(self) -> list[str]:
        """The lines that a run prints about its data: one per file, then counts, then notes."""
        lines = [f"{file.path}: {file.detected}, {file.num_rows} rows, {file.num_records} used" for file in self.files]
        lines.append(f"{self.num_tokens} tokens, {self.num_counted} of them in the loss")
        if self.truncated:
            lines.append(f"{self.truncated} rows were cut to data.max_length")
        if self.dropped:
            lines.append(f"{self.dropped} rows longer than data.max_length were dropped (data.truncation=drop)")
        if self.bad_rows:
            kinds = Counter(row.kind for row in self.bad_rows)
            listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            lines.append(f"{len(self.bad_rows)} bad rows were skipped (data.bad_rows=skip): {listed}")
        return lines + self.notes


@dataclass(frozen=True)
class ReadRow:
    """A row as tokens. texts: one for each response of `row`, or several if the template rewrites earlier turns."""

    place: RowPlace
    row: ExampleRow
    texts: list[list[Tokens]]


class FileReader:
    """Reads files for one kind of records, a key of `schemas.SHAPES`. All files must have the same columns.

    report: counts everything but the files.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: ReadingOptions,
        kind: str,
        images: PromptImages | None = None,
    ):
        """images: reads those of rows; None: rows are text. Raises ConfigError for options that do not go with the
        kind.
        """
        if kind != "examples" and options.loss_on == "all":
            raise ConfigError(
                "data.loss_on=all is for supervised fine-tuning: preferences and scores judge the responses alone; "
                "try: data.loss_on=answers"
            )
        self.report = ReadingReport()
        self._tokenizer = tokenizer
        self._options = options
        self._kind = kind
        self._images = images
        self._encoder = Encoder(tokenizer, options.append_eos, options.end_token_ids)
        self._process: TemplateProcess[Answers, list[list[Draft]] | RowProblem] | None = None
        self._first: tuple[str, Columns] | None = None

    def read(self, path: str, file_rows: FileRows) -> tuple[str, int, list[ReadRow]]:
        """(schema and columns in words, number of rows, the usable rows) of a file. The report gets the bad rows.

        file_rows: those to use; the others are not looked at.

        Raises ConfigError for a file that cannot be read, and for one with other columns than the files before it.
        """
        columns = self._columns(path)
        as_chat = self._as_chat(columns)
        reader, images = RowReader(columns, self._kind, as_chat, self._images), self._images
        names = (*columns.names.values(), *(() if images is None else (images.column,)))
        rows, bad_rows = read_rows(path, names, reader.read, file_rows, None if images is None else images.column)
        num_rows = len(rows) + len(bad_rows)
        if images is not None:
            bad_images = images.problems([(place, row.images) for place, row in rows])
            bad_places = {bad.place for bad in bad_images}
            rows, bad_rows = [each for each in rows if each[0] not in bad_places], [*bad_rows, *bad_images]
        encoded: list[ReadRow] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            encoded += self._encoded(self._drafted(rows[start : start + ROWS_AT_ONCE], bad_rows), bad_rows)
        self.report.bad_rows += sorted(bad_rows, key=lambda row: row.place.row)
        return str(columns) + (", a prompt becomes a user's message" if as_chat else ""), num_rows, encoded

    def close(self) -> None:
        """End the process that renders conversations, if there is one."""
        if self._process is not None:
            self._process.close()

    def _columns(self, path: str) -> Columns:
        forms = column_forms(path)
        if self._images is not None:
            self._images.check_column(path, forms)
        columns = find_columns(path, forms, self._options, self._kind)
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
        """The rows with their texts. Raises ConfigError for a row that takes the template too much time or memory, even
        if bad rows are skipped: the other rows may take as much.
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
        """`drafts_of_answers` of each row, in the template's process from the first conversation on."""
        if self._process is None:
            how = self._options.loss_on, self._kind == "examples"
            if not any(isinstance(answer, Chat) for answers in rows for answer in answers):
                return drafts_of_rows(None, *how, rows)
            kwargs, ends = self._options.apply_chat_template_kwargs, self._options.end_token_ids
            template = ChatTemplate(self._tokenizer, kwargs, ends)
            self._process = TemplateProcess(partial(drafts_of_rows, template, *how))
        return self._process.map(rows)

    def _encoded(self, drafted: Sequence[Drafted], bad_rows: list[BadRow]) -> Iterator[ReadRow]:
        encoded = iter(self._encoder.encode([draft for *_, answers in drafted for own in answers for draft in own]))
        for place, row, answers in drafted:
            texts = [[next(encoded) for _ in own] for own in answers]
            try:
                kept = self._fitted(self._showing(texts, answers, row.images))
            except RowProblem as problem:
                bad_rows.append(problem.at(place))
                continue
            if any(kept):
                self.report.rewritten += max(len(own) for own in texts) > 1
                self._count((draft for own in answers for draft in own), (text for own in kept for text in own))
                yield ReadRow(place, row, kept)

    def _showing(
        self, texts: list[list[Tokens]], answers: list[list[Draft]], images: Sequence[StoredImage]
    ) -> list[list[Tokens]]:
        """The texts of one row with all placeholders of its images. Raises RowProblem."""
        if self._images is None:
            return texts
        reads = self._images.written_out
        return [
            [
                text.with_images(*reads(text.ids, images[: draft.num_images]))
                for text, draft in zip(own, drafts, strict=True)
            ]
            for own, drafts in zip(texts, answers, strict=True)
        ]

    def _fitted(self, texts: list[list[Tokens]]) -> list[list[Tokens]]:
        """The texts of one row within `max_length`, counted. Raises RowProblem."""
        if len(texts) == 1:
            kept, cut, dropped = fitted(texts[0], self._options, shares_prompt=False)
            whole = [kept]
        else:
            answers = _with_one_prompt([text for (text,) in texts])
            kept, cut, dropped = fitted(answers, self._options, shares_prompt=True)
            whole = [[text] for text in kept]
        self.report.dropped += dropped > 0 and not any(whole)
        self.report.truncated += cut > 0 or (dropped > 0 and any(whole))
        return whole

    def _count(self, drafts: Iterable[Draft], texts: Iterable[Tokens]) -> None:
        for draft in drafts:
            self.report.ended += draft.is_open and self._options.append_eos
            self.report.altered += draft.is_altered
            self.report.unwritten.update(draft.unwritten)
        for text in texts:
            self.report.split += text.is_split
            self.report.num_tokens += len(text.ids)
            self.report.num_counted += sum(text.counts)


def drafts_of_rows(
    template: ChatTemplate | None, loss_on: str, may_be_several: bool, rows: Sequence[Answers]
) -> list[list[list[Draft]] | RowProblem]:
    """`drafts_of_answers` of each row."""
    return [drafts_of_answers(template, loss_on, may_be_several, answers) for answers in rows]


def drafts_of_answers(
    template: ChatTemplate | None, loss_on: str, may_be_several: bool, answers: Answers
) -> list[list[Draft]] | RowProblem:
    """The texts of each response of a row, or its problem. template: None if all responses are plain text.

    may_be_several: whether a response of several turns may become as many texts.
    """
    texts = []
    try:
        for answer in answers:
            if isinstance(answer, Text) or template is None:
                texts.append([plain_draft(answer, loss_on)])  # type: ignore[arg-type]  # else it is a Text
                continue
            drafts = template.drafts(answer, loss_on)
            if len(drafts) > 1 and not may_be_several:
                raise RowProblem("template_rewrites", "", "a response of several turns, of which it rewrites the first")
            texts.append(drafts)
    except RowProblem as problem:
        return problem
    return texts


def _with_one_prompt(answers: list[Tokens]) -> list[Tokens]:
    """The responses with one `prompt_length`: tokens with which all of them begin."""
    most = min(answer.prompt_length for answer in answers)
    first = answers[0].ids
    shared = next((n for n in range(most) if any(answer.ids[n] != first[n] for answer in answers)), most)
    return [replace(answer, prompt_length=shared) for answer in answers]
