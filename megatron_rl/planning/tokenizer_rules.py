"""Check that a reward model can read the actor's output: both give a token the same id, or it reads text.

Token ids are compared by the tokenizer.json of both folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.weight_files import odd_files
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import Violation

FILE = "tokenizer.json"
TOKENIZER_FILES = (FILE, "tokenizer.model", "vocab.json")


def reading_problems(
    actor: ModelFolder, role: RoleSpec, model: ModelFolder, *, config_only: bool = False
) -> Iterable[Violation]:
    """Yield why a reward model cannot read the actor's tokens, or with `input_tokenizer` their text.

    model: the folder of the reward model. config_only: folders may have no tokenizer.
    """
    actor_path = str(actor.given)
    if not role.reads_text:
        for problem in different_tokens(actor, model):
            nearest = {f"{role.model_key.removesuffix('path')}input_tokenizer": actor_path}
            rule = f"must have the actor's tokens, or read text: {problem}"
            yield Violation({role.model_key: role.model_path}, rule, nearest)
        return
    key, path = f"{role.key}.model.input_tokenizer", role.settings.model.input_tokenizer
    folder, nearest = Path(path).expanduser(), {key: actor_path}
    if not folder.is_dir():
        rule = "must be the folder of the actor's tokenizer, and it does not exist"
        parent = folder.parent
        others = [str(other) for other in parent.iterdir() if other.is_dir()] if parent.is_dir() else []
        like = nearest_name(str(folder), others) if others else actor_path
        hint = "" if like == actor_path else f"or did you mean: {like}"
        yield Violation({key: path}, rule, nearest, hint)
    elif not config_only and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        held = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        rule = f"must hold the actor's tokenizer ({', '.join(TOKENIZER_FILES)}); it holds {held:.200}"
        yield Violation({key: path}, rule, nearest)
    elif not config_only and (odd := odd_files(folder)):
        yield Violation({key: path}, f"must hold files that can be read: {odd[0]}", nearest)
    else:
        for problem in different_tokens(actor, ModelFolder(path)):
            yield Violation({key: path}, f"must hold the actor's tokenizer: {problem}", nearest)


def different_tokens(actor: ModelFolder, other: ModelFolder) -> Iterable[str]:
    """Yield a sentence where tokens of the actor have other ids in another folder, or no row in its model; nothing
    where a tokenizer.json is missing or unreadable.
    """
    files = [folder.path / FILE for folder in (actor, other)]
    yield from _without_row(files[0], other)
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    try:
        ours, theirs = (_numbers(read_json_object(file)) for file in files)
    except (UnreadableFileError, ValueError, TypeError, KeyError):
        return  # the model folder's own loader reports it
    different = {token for token, number in ours.items() if theirs.get(token) != number}
    if different:
        example = min(different, key=lambda token: ours[token])
        yield (
            f"{len(different)} of {len(ours)} have other ids or are missing in its {FILE}, the first is "
            f"{example!r} ({ours[example]} in {actor.given}, {theirs.get(example)} there)"
        )


def _without_row(file: Path, other: ModelFolder) -> Iterable[str]:
    """Yield a sentence where a model has fewer rows than the actor's tokenizer has tokens. file: tokenizer.json."""
    try:
        num_tokens = max(_numbers(read_json_object(file)).values(), default=-1) + 1
    except (UnreadableFileError, ValueError, TypeError, KeyError):
        return  # the model folder's own loader reports it
    size = other.facts.get("vocab_size")
    if isinstance(size, int) and size < num_tokens:
        yield f"the actor's tokenizer has {num_tokens} tokens, and vocab_size of its config.json is {size}"


def base_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id of the tokens of ordinary text, that is without added tokens.

    tokenizer: content of tokenizer.json. Returns {} where it has no readable vocabulary, which its own loader reports.
    """
    try:
        added = {token["content"] for token in tokenizer.get("added_tokens", [])}
        return {token: number for token, number in _vocabulary(tokenizer).items() if token not in added and number >= 0}
    except (ValueError, TypeError, KeyError):
        return {}


def all_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id of all tokens in the content of tokenizer.json; {} as `base_tokens`."""
    try:
        return _numbers(tokenizer)
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _numbers(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id of the model and of added tokens in tokenizer.json."""
    return _vocabulary(tokenizer) | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id of the model in tokenizer.json: a mapping, or for Unigram a list of pairs.

    Raises KeyError, TypeError or ValueError for what is neither.
    """
    vocabulary: Any = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):
        return {str(token): number for number, (token, _) in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not all(type(number) is int for number in vocabulary.values()):
        raise TypeError("a vocabulary maps tokens to ids")
    return vocabulary
