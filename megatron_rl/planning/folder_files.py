"""Find damaged weights, tokenizer and generation settings of a model folder, and folders whose tokens differ.

Only the headers of weights are read, and compared with the lengths of the files; with a list of digests, every byte. A
reward model can read the actor's output where both folders give a token the same id, or where it reads text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.identity import unlike_the_list
from megatron_rl.checkpoint.model_folder import GENERATION, ModelFolder
from megatron_rl.checkpoint.weight_files import StoredTensor, odd_files
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import Violation

FILE = "tokenizer.json"
TOKENIZER_FILES = (FILE, "tokenizer.model", "vocab.json")
OBJECTS = (FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
"""Optional files of a tokenizer that must be JSON objects."""


@dataclass(frozen=True)
class FolderFiles:
    """The files of a model folder in addition to config.json.

    faults: sentences with the name of a damaged file. tensors: name -> stored tensor. tokens: token -> id, of those
    that the tokenizer makes of ordinary text.
    """

    faults: list[str]
    tensors: dict[str, StoredTensor]
    tokens: dict[str, int]

    @classmethod
    def read(cls, folder: ModelFolder) -> FolderFiles:
        """Read a folder. Only the headers of weights are read, but for what the folder's own list of digests names."""
        tensors, faults = folder.stored[0], [*folder.stored[1]]
        tokens: dict[str, int] = {}
        for name in (*OBJECTS, GENERATION):
            if not (folder.path / name).exists():
                continue
            try:
                content = read_json_object(folder.path / name)
            except UnreadableFileError as error:
                faults.append(str(error))
                continue
            if name == "tokenizer.json" and not isinstance(content.get("model"), dict):
                faults.append(f"{name} has no model of a tokenizer")
            elif name == "tokenizer.json":
                tokens = base_tokens(content)
        return cls(faults + unlike_the_list(folder.path), tensors, tokens)


def lacking_in(folder: Path) -> list[str]:
    """Return what files a folder is missing in addition to config.json."""
    rules = []
    if not any(folder.glob("*.safetensors")):
        rules.append("must hold *.safetensors files")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        code = [file.name for file in sorted(folder.glob("tokenization_*.py"))]
        own = f", as {code[0]} is not one: no code of a folder is run" if code else ""
        rules.append(f"must hold a tokenizer ({', '.join(TOKENIZER_FILES)}){own}")
    return rules


def end_token_problems(key: str, folder: ModelFolder, vocab_size: int) -> Iterator[Violation]:
    """Check that a folder to generate from names end tokens, and that they are in its vocabulary.

    Damaged files are reported elsewhere.
    """
    path, has_own = str(folder.given), (folder.path / GENERATION).exists()
    try:
        generation = read_json_object(folder.path / GENERATION) if has_own else folder.settings
        ends, file = folder.declared_ends, GENERATION if has_own else "config.json"
    except UnreadableFileError:
        return
    beyond = [end for end in ends or () if end >= vocab_size]
    if beyond:
        rule = f"must end responses with tokens of its model: eos_token_id {beyond[0]} of its {file}"
        yield Violation({key: path}, f"{rule} is not below vocab_size({vocab_size})")
    if ends is None:
        given = f"{generation.get('eos_token_id')!r:.80}" if "eos_token_id" in generation else "missing"
        rule = "must name the tokens that end a response: eos_token_id must be a token id, or a list of token ids"
        yield Violation({key: path}, f"{rule}; in its {file} it is {given}")


def end_token_notes(folder: ModelFolder) -> list[str]:
    """Return a line where the tokenizer's files name another end token than the model's do; a response ends at both."""
    try:
        declared = folder.declared_ends or []
        named = read_json_object(folder.path / "tokenizer_config.json").get("eos_token")
        content = read_json_object(folder.path / "tokenizer.json")
    except UnreadableFileError:
        return []  # damaged files are reported elsewhere; a tokenizer of other files is compared when a run starts
    own = named.get("content") if isinstance(named, dict) else named
    number = all_tokens(content).get(own) if isinstance(own, str) else None
    if number is None or not declared or number in declared:
        return []
    ends = ", ".join(map(str, sorted({number, *declared})))
    what = f"its tokenizer {own} ({number}), its {GENERATION} or config.json {', '.join(map(str, declared))}"
    return [f"the files of {folder.given} name different end tokens: {what}; responses end at each of {ends}"]


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
