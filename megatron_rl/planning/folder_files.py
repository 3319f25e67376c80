"""Find damaged weights, tokenizer and generation settings of a model folder.

Only the headers of weights are read, and compared with the lengths of the files; with a list of digests, every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.identity import unlike_the_list
from megatron_rl.checkpoint.model_folder import GENERATION, ModelFolder
from megatron_rl.checkpoint.weight_files import StoredTensor
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.errors import Violation
from megatron_rl.planning.tokenizer_rules import TOKENIZER_FILES, all_tokens, base_tokens

OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
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
