"""What was read: how many rows of each file became what, and every row that did not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_rl.data.prompt_mixture import PromptFile
from megatron_rl.data.row_problems import BadRow


@dataclass(frozen=True)
class FileRead:
    """One file. detected: its schema and columns, in words. num_records: what its rows became, in order; digests of
    them by what they are of, as `MixtureCursor` compares them when a run goes on.
    """

    path: str
    detected: str
    num_rows: int
    num_records: int
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadingReport:
    """files: in the order given; their records lie end to end in what was read with the report.

    bad_rows: rows that were skipped. truncated: rows of which some tokens were cut off. dropped: rows longer than
    `max_length` that `truncation=drop` left out. notes: what else a reader of the run's output should know.
    Every row of a file is a bad row, dropped, or in the records.
    """

    files: tuple[FileRead, ...]
    bad_rows: tuple[BadRow, ...] = ()
    truncated: int = 0
    dropped: int = 0
    num_tokens: int = 0
    num_counted: int = 0
    notes: tuple[str, ...] = ()

    def prompt_files(self) -> list[PromptFile]:
        """The files as `data.prompt_mixture.MixtureCursor` takes them, for an order that is seeded and resumable."""
        return [PromptFile(one.path, one.num_records, one.digests) for one in self.files]

    def lines(self) -> list[str]:
        """What a run prints about its data, a line per file and one for whatever was cut, dropped or skipped."""
        told = [f"{one.path}: {one.detected}, {one.num_rows} rows, {one.num_records} used" for one in self.files]
        told.append(f"{self.num_tokens} tokens, {self.num_counted} of them in the loss")
        if self.truncated:
            told.append(f"{self.truncated} rows were cut to data.max_length")
        if self.dropped:
            told.append(f"{self.dropped} rows longer than data.max_length were dropped (data.truncation=drop)")
        if self.bad_rows:
            kinds = Counter(row.kind for row in self.bad_rows)
            listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            told.append(f"{len(self.bad_rows)} bad rows were skipped (data.bad_rows=skip): {listed}")
        return told + list(self.notes)
