"""What is damaged among a model folder's weights, tokenizer and generation settings, as far as can be read cheaply.

Of weights only headers are read, and compared with the files' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.checkpoint.identity import end_tokens
from megatron_rl.checkpoint.weight_files import WeightFileError, read_json, read_weight_files
from megatron_rl.errors import Violation
from megatron_rl.planner.config_json import ConfigJsonError, read_config_json

GENERATION = "generation_config.json"
OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
"""Files of a tokenizer that are objects in JSON, where they are there."""


def damaged_files(folder: Path) -> Iterator[str]:
    """What is wrong with files that are there, each with the file's name."""
    yield from read_weight_files(folder)[1]
    for name in (*OBJECTS, GENERATION):
        if not (folder / name).exists():
            continue
        try:
            content = read_json(folder / name)
        except WeightFileError as error:
            yield str(error)
            continue
        if not isinstance(content, dict):
            yield f"{name} is not an object in braces"
        elif name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            yield f"{name} has no model of a tokenizer"


def end_token_problems(key: str, path: str) -> Iterator[Violation]:
    """That a folder to generate from says which tokens end an answer; damaged files are reported elsewhere."""
    folder = Path(path).expanduser()
    has_own = (folder / GENERATION).exists()
    try:
        settings = read_config_json(folder / "config.json")
        said = read_json(folder / GENERATION) if has_own else settings
    except (ConfigJsonError, WeightFileError):
        return
    if isinstance(said, dict) and end_tokens(folder, settings) is None:
        file = GENERATION if has_own else "config.json"
        given = f"{said.get('eos_token_id')!r:.80}" if "eos_token_id" in said else "not there"
        rule = "must say which tokens end an answer: eos_token_id must be the number of a token, or a list of some"
        yield Violation({key: path}, f"{rule}; in its {file} it is {given}")
