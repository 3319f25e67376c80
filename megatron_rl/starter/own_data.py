"""A user's own file of questions: which columns are read, what scores the responses, and one prompt as it is sent."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.schema import GROUND_TRUTH, DataConfig
from megatron_rl.config.synonyms import ANSWERS, PROMPTS, SOURCES, TRUTHS, suggested_column
from megatron_rl.data.long_prompts import has_tokenizer, num_bytes
from megatron_rl.data.prompt_dataset import Located, read_prompts, tokenise
from megatron_rl.data.row_files import column_forms, first_row
from megatron_rl.errors import ConfigError
from megatron_rl.starter.project import NO_TRUTH, PROMPT_OPTION, TRUTH_OPTION, OwnFiles

PARTS = {"instruction", "input"}
"""Two columns that make up a prompt together."""
Ask = Callable[[str, str, Sequence[str]], str]
"""(option, question, choices) -> the user's choice. Raises ConfigError where no user can be asked."""
SPLIT_FILE = "prompts.jsonl"
"""The file that `split_command` writes."""
MOST_TOKENISED = 2000
"""Prompts that are tokenised, the longest ones by their bytes, to find how many tokens the longest has."""


@dataclass(frozen=True)
class ColumnChoice:
    """column: None where several would do, or none has a usual name. candidates: columns to choose from, the surest
    first.
    """

    column: str | None
    candidates: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        """The candidates that were not chosen."""
        return tuple(name for name in self.candidates if name != self.column)


def prompt_choice(forms: Mapping[str, str], answered: Collection[str], filled: Collection[str]) -> ColumnChoice:
    """Choose the column of prompts. forms: column -> form, see `column_forms`.

    answered: columns of conversations that end with the assistant's turn. filled: columns that are not empty in the
    first row.
    """
    usable = {
        name.lower(): name
        for name, form in forms.items()
        if form in ("text", "messages") and "." not in name and name not in answered
    }
    named = tuple(usable[name] for name in PROMPTS if name in usable)
    if usable.keys() >= PARTS:
        return ColumnChoice(None if usable["input"] in filled else usable["instruction"], named)
    if named:
        return ColumnChoice(named[0] if len(named) == 1 else None, named)
    rest = tuple(column for name, column in usable.items() if name not in {*ANSWERS, *SOURCES})
    return ColumnChoice(rest[0] if len(rest) == 1 else None, rest)


def truth_choice(forms: Mapping[str, str], prompt: str) -> ColumnChoice:
    """Choose the column of expected answers: verl's field, or the surest of those with a usual name."""
    if forms.get(GROUND_TRUTH, "null") != "null":
        return ColumnChoice(GROUND_TRUTH, (GROUND_TRUTH,))
    usable = {
        name.lower(): name
        for name, form in forms.items()
        if form in ("text", "number", "boolean", "texts", "numbers") and "." not in name and name != prompt
    }
    named = tuple(usable[name] for name in TRUTHS if name in usable)
    return ColumnChoice(named[0] if named else None, named or tuple(usable.values()))


def check_column(option: str, name: str, forms: Mapping[str, str], path: str, usual: Collection[str]) -> None:
    """Raise ConfigError for a column that an option names and that the file lacks."""
    if name not in forms:
        like = suggested_column(name, tuple(usual), list(forms))
        hint = "" if like is None else f"; did you mean: {option} {like}"
        raise ConfigError(f"{option} {name} must be a column of {path}; it has {listed(forms)}{hint}")


def listed(forms: Mapping[str, str]) -> str:
    """Return columns with their forms, as a list for people."""
    return ", ".join(f"{name} ({form})" for name, form in forms.items())


@dataclass(frozen=True)
class OwnData:
    """Files of a user's with the keys by which they are read. val: None: rows of `train` are to be held out.

    rows, truths: prompts with their places, and expected answers, of both files. others: columns that might have been
    the expected answer, too.
    """

    train: Path
    val: Path | None
    keys: DataConfig
    rows: list[Located]
    truths: list[Any]
    others: tuple[str, ...] = ()

    @property
    def files(self) -> OwnFiles:
        """The files, with the keys that differ from their defaults."""
        names = ("prompt_key", "prompt_as_chat", "ground_truth_key", "default_data_source", "filter_overlong_prompts")
        usual = DataConfig()
        keys = {name: value for name in names if (value := getattr(self.keys, name)) != getattr(usual, name)}
        return OwnFiles(self.train, self.val, len(self.rows), keys)


def read_own_data(
    train: Path,
    val: Path | None,
    options: tuple[str | None, str | None],
    has_template: bool,
    ask: Ask,
    needs_truth: bool = True,
) -> OwnData:
    """Find the columns of a file and read it, and the held-out file, by them.

    options: columns of prompts and expected answers, where they are given. has_template: whether the model has a chat
    template, which prompts of text then go through. needs_truth: whether the reward function compares with an expected
    answer. Raises ConfigError for files that cannot be read so, and where no user can be asked about a column.
    """
    path = str(train)
    forms = column_forms(path)
    prompt_key = _prompt_key(path, forms, options[0], ask)
    truth_key, others = _truth_key(path, forms, prompt_key, options[1], ask, needs_truth)
    source = next((name for name in SOURCES[:1] if forms.get(name) == "text"), None)
    keys = DataConfig(
        prompt_key=prompt_key,
        ground_truth_key=truth_key,
        default_data_source=train.stem if source is None else None,
        prompt_as_chat=True if has_template and forms[prompt_key] == "text" else None,
    )
    read = [read_prompts(str(file), keys) for file in (train, val) if file is not None]
    rows = [row for places, prompts in read for row in zip(places, prompts.objects("raw_prompt"), strict=True)]
    truths = [truth for _, prompts in read for truth in prompts.objects("ground_truth")]
    resolved = None if val is None else val.expanduser().resolve()
    return OwnData(train.expanduser().resolve(), resolved, keys, rows, truths, others)


def _prompt_key(path: str, forms: dict[str, str], given: str | None, ask: Ask) -> str:
    if given is not None:
        check_column(PROMPT_OPTION, given, forms, path, PROMPTS)
        return given
    first = first_row(path, list(forms))
    answered = {name for name, form in forms.items() if form == "messages" and _ends_answered(first.get(name))}
    choice = prompt_choice(forms, answered, {name.lower() for name, value in first.items() if value})
    if choice.column is not None:
        return choice.column
    if not choice.candidates and answered:
        raise ConfigError(
            f"{path} has conversations that end with the assistant's response ({', '.join(sorted(answered))}), which "
            "`megatron-rl sft` learns from; here the policy writes the response, so a prompt must end before it. Take "
            f"the last message as the expected answer:\n  {split_command(path, min(answered))}\n"
            f"and give --data {SPLIT_FILE}"
        )
    return _asked(ask, PROMPT_OPTION, f"Column of prompts in {path}, which has {listed(forms)}", choice, path, forms)


def _truth_key(
    path: str, forms: dict[str, str], prompt: str, given: str | None, ask: Ask, needs_truth: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the column of expected answers, or None, and other columns that might be meant."""
    if given is not None:
        if given == NO_TRUTH:
            return None, ()
        check_column(TRUTH_OPTION, given, forms, path, TRUTHS)
        return given, ()
    choice = truth_choice(forms, prompt)
    if choice.column is not None:
        return choice.column, choice.others
    if not needs_truth:
        return None, ()
    choices = replace(choice, candidates=(*choice.candidates, NO_TRUTH))
    question = f"Column of expected answers in {path}, which has {listed(forms)} ({NO_TRUTH}: there are none)"
    column = _asked(ask, TRUTH_OPTION, question, choices, path, forms)
    return (None if column == NO_TRUTH else column), ()


def _asked(ask: Ask, option: str, question: str, choice: ColumnChoice, path: str, forms: dict[str, str]) -> str:
    if not choice.candidates:
        rule = f"{path} has no column of text or messages for prompts ({option})"
        raise ConfigError(f"{rule}: it has {listed(forms)}; try: add a column question with texts")
    usual = PROMPTS if option == PROMPT_OPTION else TRUTHS
    is_named = any(name.lower() in usual for name in choice.candidates)
    cause = "more than one would do" if is_named else "none has a usual name"
    column = ask(option, f"{question}: {cause}", choice.candidates)
    if column != NO_TRUTH:
        check_column(option, column, forms, path, usual)
    return column


def split_command(path: str, column: str) -> str:
    """Return a shell command that writes conversations as prompts and their last messages as expected answers.

    Where each has two messages, a prompt is the text of the first, which a model without a chat template can read.
    """
    file = json.dumps(path)
    if path.endswith(".parquet"):
        read = f"import json, pyarrow.parquet; rows = pyarrow.parquet.read_table({file}).to_pylist()"
    else:
        read = f'import json; rows = map(json.loads, filter(str.strip, open({file}, encoding="utf-8")))'
    listing = f"every = [row[{json.dumps(column)}] for row in rows]; is_text = all(len(m) == 2 for m in every)"
    written = '{"prompt": m[0]["content"] if is_text else m[:-1], "answer": m[-1]["content"]}'
    code = f"{read}; {listing}; [print(json.dumps({written})) for m in every]"
    return f"python -c {shlex.quote(code)} > {SPLIT_FILE}"


def _ends_answered(messages: Any) -> bool:
    """Whether a conversation ends with the assistant's turn."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


@dataclass(frozen=True)
class PromptLengths:
    """longest: tokens of the longest prompt; without a tokenizer its bytes, which are at least as many. shown: the
    first prompt as the policy gets it. num_tokens: of that one; None without a tokenizer.
    """

    longest: int
    shown: str
    num_tokens: int | None


def prompt_lengths(own: OwnData, model: Path) -> PromptLengths:
    """Render and tokenise the longest prompts. Raises ConfigError for a tokenizer or a prompt that cannot be used."""
    by_size = sorted(own.rows[1:], key=lambda located: num_bytes(located[1]), reverse=True)
    some = [own.rows[0], *by_size[: MOST_TOKENISED - 1]]
    if not has_tokenizer(model):
        first = own.rows[0][1]
        text = first if isinstance(first, str) else "\n".join(f"{each['role']}: {each['content']}" for each in first)
        return PromptLengths(max(num_bytes(prompt) for _, prompt in some), text, None)
    tokenizer = ModelFolder(model).tokenizer
    ids = tokenise(str(own.train), some, tokenizer, own.keys)
    shown = tokenizer.decode(ids[0], clean_up_tokenization_spaces=False)
    return PromptLengths(max(map(len, ids)), shown, len(ids[0]))


def longest_truth(own: OwnData, model: Path) -> int:
    """Return the tokens of the longest expected answer; without a tokenizer its bytes."""
    texts = sorted({str(truth) for truth in own.truths}, key=len, reverse=True)[:MOST_TOKENISED]
    if not has_tokenizer(model):
        return max(len(text.encode()) for text in texts)
    tokenizer = ModelFolder(model).tokenizer
    return max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
