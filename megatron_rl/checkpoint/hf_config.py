"""Read a folder's config.json as transformers' class of its family."""

from __future__ import annotations

from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from megatron_rl.config.json_files import read_json_object
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import KNOWN_TYPES, inside_of


def read_hf_config(folder: Path | str) -> PretrainedConfig:
    """Return the settings of a Hugging Face folder with transformers' defaults.

    A published model_type that transformers does not know is read as the one it stands for, without the folder's own
    code, and is saved as that one. Raises ConfigError for a folder that transformers cannot read.
    """
    file = Path(folder) / "config.json"
    try:
        kind = read_json_object(file).get("model_type") if file.is_file() else None
        if not isinstance(kind, str) or kind not in KNOWN_TYPES:
            settings: PretrainedConfig = AutoConfig.from_pretrained(folder)
            return settings
        own: PretrainedConfig = CONFIG_MAPPING[KNOWN_TYPES[kind]].from_pretrained(folder)
    except Exception as error:  # transformers' checks of types raise errors of their own
        raise ConfigError(f"transformers cannot read {file}: {' '.join(str(error).split())[:500]}") from error
    own.model_type = KNOWN_TYPES[kind]  # by which transformers finds how weights are named, too
    return own


def read_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face folder, whose settings are read as `read_hf_config` does; no code of the
    folder is run. Raises ConfigError as that, and transformers' errors.
    """
    return AutoTokenizer.from_pretrained(folder, config=read_hf_config(folder), trust_remote_code=False)


def language_config(folder: Path | str) -> PretrainedConfig:
    """Return `read_hf_config`; of a model with a language model inside, that language model's part.

    The part keeps the architecture of the whole.
    """
    config = read_hf_config(folder)
    inside = inside_of(config.architectures)
    if inside is None:
        return config
    text: PretrainedConfig = getattr(config, inside.key)
    text.architectures, text.tie_word_embeddings = config.architectures, config.tie_word_embeddings
    return text
