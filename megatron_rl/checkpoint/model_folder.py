"""A Hugging Face model folder: what its files hold, each read once, when it is first asked for.

What only a part of the program needs imports its libraries there: settings need neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.checkpoint.weight_files import StoredTensor, read_weight_files
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import (
    KNOWN_TYPES,
    ImageForm,
    Model,
    family_of,
    image_form,
    inside_of,
    text_settings,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
"""Files that give tokens their numbers. Changes of other tokenizer files show in the prompts' tokens."""
LARGEST_CONFIG = 16 << 20
"""Bytes of a config.json; real files have a few thousand."""
END = 2
"""transformers' end token where config.json names none and the family has none of its own."""
SCORE_AT_END = "score_at_end_token"
"""A key of config.json, which exports of reward models have: the score is the one at the token that ends a response."""


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end a response: one list for all that generates, learns, reads or exports responses.

    As in vLLM's server a response ends at the tokenizer's end token, and at each `eos_token_id` of
    generation_config.json, or of config.json where there is no such file. Files of one folder may name different
    tokens: a line says so. declared: of generation_config.json or config.json. own: the tokenizer's; None: it has none.
    """

    declared: tuple[int, ...]
    own: int | None

    @property
    def ids(self) -> list[int]:
        """All of them, in ascending order."""
        return sorted({*self.declared, *(() if self.own is None else (self.own,))})

    @property
    def disagree(self) -> bool:
        """Whether generation_config.json does not have the tokenizer's end token."""
        return self.own is not None and bool(self.declared) and self.own not in self.declared


@dataclass(frozen=True)
class ModelFolder:
    """One folder. given: its path as the user wrote it. key: the configuration key that names it, for messages.

    What was read stays the same when the files change; code that changes a value makes a copy.
    """

    given: str | Path
    key: str = "actor_rollout_ref.model.path"

    @cached_property
    def path(self) -> Path:
        """Its path, without "~"."""
        return Path(self.given).expanduser()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The object in config.json. Raises UnreadableFileError."""
        return read_json_object(self.path / CONFIG, LARGEST_CONFIG)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of config.json; of a model with a language model inside, that one's. Raises as `content`."""
        names = self.content.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return self.content  # a check of the folder reports it
        try:
            return text_settings(self.content)
        except ConfigError as error:
            raise UnreadableFileError(f"{CONFIG} cannot be used: {error}") from error

    @property
    def facts(self) -> dict[str, Any]:
        """`settings`; {} where they cannot be read."""
        try:
            return self.settings
        except UnreadableFileError:
            return {}

    @cached_property
    def model(self) -> Model:
        """The model of a folder that was checked, as its parts."""
        return Model.of(self.settings)

    @cached_property
    def stored(self) -> tuple[dict[str, StoredTensor], list[str]]:
        """Name -> tensor of its files of weights, by their headers; and everything that is wrong with these."""
        return read_weight_files(self.path)

    @cached_property
    def hf_config(self) -> PretrainedConfig:
        """The settings with transformers' defaults.

        A published model_type that transformers does not know is read as the one it stands for, without the folder's
        own code, and is saved as that one. Raises ConfigError for a folder that transformers cannot read.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        try:
            kind = self.content.get("model_type") if (self.path / CONFIG).is_file() else None
            if not isinstance(kind, str) or kind not in KNOWN_TYPES:
                settings: PretrainedConfig = AutoConfig.from_pretrained(self.path)
                return settings
            own: PretrainedConfig = CONFIG_MAPPING[KNOWN_TYPES[kind]].from_pretrained(self.path)
        except Exception as error:  # transformers' checks of types raise errors of their own
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(f"transformers cannot read {self.path / CONFIG}: {reason}") from error
        own.model_type = KNOWN_TYPES[kind]  # by which transformers finds how weights are named, too
        return own

    @cached_property
    def language_config(self) -> PretrainedConfig:
        """`hf_config`; of a model with a language model inside, that one's part, with the architecture of the whole."""
        inside = inside_of(self.hf_config.architectures)
        if inside is None:
            return self.hf_config
        text: PretrainedConfig = getattr(self.hf_config, inside.key)
        text.architectures, text.tie_word_embeddings = self.hf_config.architectures, self.hf_config.tie_word_embeddings
        return text

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a file that gives tokens their numbers."""
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; no code of the folder is run. Raises ConfigError where its files are damaged or do not fit.

        Where transformers does not know the model_type of config.json, as of Kimi-K2, the tokenizer's own files decide:
        transformers would read such a config.json without a class, and fail at its rotary embedding.
        """
        from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig

        settings: PretrainedConfig | None = None
        with suppress(UnreadableFileError, ConfigError):  # what transformers makes of such a file is its own choice
            kind = self.content.get("model_type")
            is_known = not isinstance(kind, str) or (kind in CONFIG_MAPPING and kind not in KNOWN_TYPES)
            settings = self.hf_config if is_known else PretrainedConfig()
        try:
            # Without trust_remote_code=False transformers asks the terminal.
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, config=settings)
        except Exception as error:  # the library raises its own errors, and its parsers bare ones
            code = _own_code(self.path / "tokenizer_config.json")
            asked = f"it asks for code of its own, {code}, and no code of a folder is run; " if code else ""
            reason = f"{asked}{type(error).__name__}: {error!s:.500}"
            raise ConfigError(f"the tokenizer of {self.key}={self.given} cannot be loaded: {reason}") from error

    @cached_property
    def declared_ends(self) -> list[int] | None:
        """`end_tokens` of the folder, by config.json as it is."""
        return end_tokens(self.path, self.settings)

    @cached_property
    def end_tokens(self) -> EndTokens:
        """The tokens that end a response, with the tokenizer's if there is one. Raises as `tokenizer`."""
        own = self.tokenizer.eos_token_id if self.has_tokenizer else None
        return EndTokens(tuple(self.declared_ends or ()), None if own is None else int(own))

    @cached_property
    def num_tokens(self) -> int | None:
        """Number of the first ids that are tokens, up to the last one; None without a tokenizer. Raises as `tokenizer`.

        config.json may have more rows than the tokenizer has tokens, as padding. Such an id cannot be read: the text
        of a response does not have it, and other models with this tokenizer may have no row for it.
        """
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1 if self.has_tokenizer else None

    def num_sampled_tokens(self, config: RunConfig) -> int:
        """Return the number of the first ids that may be sampled: no engine samples an id that is no token, and the
        trainer's distribution is over the tokens alone, too.

        All of config.json where there is no tokenizer, and for tasks that do not sample: they compute what transformers
        computes.
        """
        vocab_size = int(self.language_config.vocab_size)
        known = self.num_tokens if config.generates else None
        return vocab_size if known is None else min(known, vocab_size)

    def write_generation_config(self, target: Path) -> None:
        """Write the generation_config.json of a folder that is made from this one. It names every token that ends a
        response, so that all programs that read the folder stop where training did.
        """
        ends, given = self.end_tokens, self.path / GENERATION
        if set(ends.ids) == set(ends.declared):
            if given.exists():
                (target / GENERATION).write_bytes(given.read_bytes())
            return
        if given.exists():
            content = read_json_object(given)
        else:
            settings = self.language_config.to_dict()
            kept = ("bos_token_id", "pad_token_id")
            content = {name: settings[name] for name in kept if settings.get(name) is not None}
        (target / GENERATION).write_text(json.dumps({**content, "eos_token_id": ends.ids}, indent=2) + "\n")


def form_of_images(folder: ModelFolder) -> ImageForm | None:
    """How the model of a folder reads images; None: it does not, or its settings cannot be read."""
    return image_form(folder.facts)


ModelFolders = Mapping[str, ModelFolder]
"""Path, as the configuration has it -> folder."""


def end_tokens(path: Path, settings: Mapping[str, Any]) -> list[int] | None:
    """The tokens that end a response, from generation_config.json of a folder if there is one, else from `settings`.

    None if they cannot be read.
    """
    file = path / GENERATION
    try:
        own = read_json_object(file) if file.exists() else {"eos_token_id": _family_end(settings), **settings}
    except UnreadableFileError:
        return None
    given: Any = own.get("eos_token_id")
    ends = [given] if isinstance(given, int) else given
    right = isinstance(ends, list) and ends and all(type(end) is int and end >= 0 for end in ends)
    return sorted(ends) if right else None


def _family_end(settings: Mapping[str, Any]) -> int | None:
    """transformers' end token where config.json names none."""
    return cast("int | None", family_of(settings["architectures"]).defaults.get("eos_token_id", END))


def model_folders(config: RunConfig) -> ModelFolders:
    """The folders that roles of a run start from, none of them read yet."""
    folders: dict[str, ModelFolder] = {}
    for role in roles_of(config):
        if role.model_path is not None:
            folders.setdefault(role.model_path, ModelFolder(role.model_path, role.model_key))
    return folders


def _own_code(file: Path) -> str:
    """The class of the folder's own code that makes its tokenizer; "" if it names none."""
    try:
        names = json.loads(file.read_text())["auto_map"]["AutoTokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(next((name for name in names if name), "")) if isinstance(names, list) else str(names)
