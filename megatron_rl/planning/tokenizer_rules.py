"""Check that a reward model can read the actor's output: both give a token the same id, or it reads text.

Token ids are compared by the tokenizer.json of both folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.weight_files import odd_files
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import Violation
from megatron_rl.planning.config_json import model_facts

FILE = "tokenizer.json"
TOKENIZER_FILES = (FILE, "tokenizer.model", "vocab.json")


def reading_problems(actor_path: str, role: RoleSpec, *, config_only: bool = False) -> Iterable[Violation]:
    """Yield why a reward model cannot read the actor's tokens, or with `input_tokenizer` their text.

    config_only: folders may have no tokenizer.
    """
    if not role.reads_text:
        yield from vocabulary_problems(actor_path, role.model_path, role.model_key)
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
        for problem in different_tokens(actor_path, path):
            yield Violation({key: path}, f"must hold the actor's tokenizer: {problem}", nearest)


def vocabulary_problems(actor_path: str, reward_path: str, key: str = "reward_model.model.path") -> Iterable[Violation]:
    """Yield why a reward model cannot read the actor's tokens; nothing where a tokenizer.json is missing or unreadable.

    key: of the reward model's folder.
    """
    for problem in different_tokens(actor_path, reward_path):
        nearest = {f"{key.removesuffix('path')}input_tokenizer": actor_path}
        yield Violation({key: reward_path}, f"must have the actor's tokens, or read text: {problem}", nearest)


def different_tokens(actor_path: str, other_path: str) -> Iterable[str]:
    """Yield a sentence where tokens of the actor have other ids in another folder, or no row in its model."""
    files = [Path(path).expanduser() / FILE for path in (actor_path, other_path)]
    yield from _without_row(files[0], other_path)
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    try:
        actor, other = (_numbers(read_json_object(file)) for file in files)
    except (UnreadableFileError, ValueError, TypeError, KeyError):
        return  # the model folder's own loader reports it
    different = {token for token, number in actor.items() if other.get(token) != number}
    if different:
        example = min(different, key=lambda token: actor[token])
        yield (
            f"{len(different)} of {len(actor)} have other ids or are missing in its {FILE}, the first is "
            f"{example!r} ({actor[example]} in {actor_path}, {other.get(example)} there)"
        )


def _without_row(file: Path, other_path: str) -> Iterable[str]:
    """Yield a sentence where a model has fewer rows than the actor's tokenizer has tokens. file: tokenizer.json."""
    try:
        num_tokens = max(_numbers(read_json_object(file)).values(), default=-1) + 1
    except (UnreadableFileError, ValueError, TypeError, KeyError):
        return  # the model folder's own loader reports it
    size = model_facts(other_path).get("vocab_size")
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
