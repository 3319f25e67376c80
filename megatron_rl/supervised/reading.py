"""From files to what the trainers learn from. All is read, checked and tokenised once, before any process starts.

For the order in which a trainer visits what was read, `prompts.mixture.MixtureCursor(report.prompt_files(), weights,
batch_size, shuffle, seed)` gives positions, epoch after epoch, and resumes.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_rl.supervised.options import ReadingOptions
from megatron_rl.supervised.records import Example, Labelled, Ranking, Scored
from megatron_rl.supervised.report import Report


def read_examples(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Example], Report]:
    """For `sft`: conversations, questions with answers, or plain text, parquet or jsonl.

    One row becomes one example, or several where the template writes earlier turns otherwise once later ones follow
    (such as without their thinking): then each answer is learned as it is generated, and the examples share `where`.

    Raises ConfigError for files that cannot be read or have no columns for this, columns that could mean two things,
    files of different schemas, bad rows unless `options.bad_rows` is "skip", and if nothing is left.
    """
    raise NotImplementedError


def read_rankings(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Ranking], Report]:
    """For `reward` and `dpo`: chosen and rejected answers, with the prompt apart or in both, or several ranked answers.

    Raises ConfigError as `read_examples`.
    """
    raise NotImplementedError


def read_labelled(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Labelled], Report]:
    """For KTO: answers with a label; of a file of preferences, the chosen answer as desirable, then the rejected one.

    Raises ConfigError as `read_examples`.
    """
    raise NotImplementedError


def read_scored(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: ReadingOptions
) -> tuple[list[Scored], Report]:
    """For `reward` by regression: answers with a score.

    Raises ConfigError as `read_examples`.
    """
    raise NotImplementedError
