"""The report of what was read: what the rows of each file became, and every row that could not be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_rl.data.prompt_mixture import PromptFile
from megatron_rl.data.row_problems import BadRow


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
