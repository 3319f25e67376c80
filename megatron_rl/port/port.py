"""From a verl script, its arguments or its YAML file to settings of this program, with notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from megatron_rl.config.keys import is_key
from megatron_rl.config.load import read_override, read_settings, settings_of
from megatron_rl.config.setting import TAKEN_AWAY, Setting, final_settings, nested
from megatron_rl.config.synonyms import suggested_key
from megatron_rl.config.verl_compat.default_differences import PORTED
from megatron_rl.config.verl_compat.semantic_differences import meanings
from megatron_rl.config.verl_compat.translate import Kind, Note, Noted, translate
from megatron_rl.config.yaml_text import read_yaml
from megatron_rl.errors import ConfigError
from megatron_rl.planning.feature_checks import feature_problems
from megatron_rl.port.launch import DEFAULT_CONFIGS, TrainerCall, call_of, trainer_call, unread_words
from megatron_rl.port.resolve_defaults import ORIGIN, defaults, resolve_defaults, unread_models
from megatron_rl.port.shell import launches_of

YAML_SUFFIXES = (".yaml", ".yml")
SOMETHING_LOST = 3
"""Exit code where a script asks for a feature that is not here."""


@dataclass(frozen=True)
class Ported(Noted):
    """A translated script, and the file that is written of it.

    settings: of the file; what is not supported keeps its own key, so that a run refuses it. notes: of the keys that
    are not taken as they are. unread: models that were not looked into. beside: what the script does that no
    configuration can hold. refused: what the kernel refused to the script while it was run. apart: features that a run
    refuses together.
    """

    source: str
    settings: list[Setting]
    notes: list[Note]
    unread: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)

    def lists(self) -> list[str]:
        """Return the lists as lines, then those of what was not read, not taken and refused, if there is any."""
        lines = []
        for kind in Kind:
            notes = self.of(kind)
            lines += [f"{kind.value}: {len(notes) or 'nothing'}", *(f"  {note}" for note in notes)]
        for heading, further in (
            ("models that cannot be read here, so that nothing was checked against them", self.unread),
            ("set by the script, and not in this file", self.beside),
            ("refused to the script while it was run", self.refused),
            ("refused when a run starts", self.apart),
        ):
            if further:
                lines += [f"{heading}:", *(f"  {what}" for what in further)]
        return lines

    def yaml(self) -> str:
        """Return the file, with the lists as comments."""
        own = [setting for setting in self.settings if setting.origin != ORIGIN]
        text = [f"{PORTED} from {self.source}."]
        if self.features:
            text.append(
                f"# Not here, so that a run is refused until their keys are taken out: {', '.join(self.features)}."
            )
        text += ["# " + " ".join(line.splitlines()) for line in self.lists()]
        added = [setting for setting in self.settings if setting.origin == ORIGIN]
        if added:
            text.append("# verl's defaults, which are others here: " + ", ".join(setting.key for setting in added))
        return "\n".join(
            [*text, "", yaml.safe_dump(nested([*own, *added]), sort_keys=False, allow_unicode=True, width=120)]
        )


def port(
    source: Path | None, arguments: Sequence[str], environment: Mapping[str, str], is_trusted: bool = False
) -> Ported:
    """Translate a source: a shell script, a YAML file, or None for arguments alone.

    arguments: Hydra's, after the source's own. is_trusted: run the script without confinement. Raises ConfigError for a
    source that cannot be read or resolved.
    """
    if is_trusted and (source is None or source.suffix in YAML_SUFFIXES):
        raise ConfigError(f"--trust-script is for a shell script, and {source or 'arguments'} is none; leave it out")
    if source is None:
        return ported("arguments", call_of(arguments), [])
    if not source.is_file():
        raise ConfigError(f"there is no file {source}: give a shell script, a YAML file, or -- KEY=VALUE ...")
    if source.suffix in YAML_SUFFIXES:
        return ported(str(source), call_of(arguments), _file_settings(source))
    ran = launches_of(source, arguments, environment, is_trusted)
    call, beside = trainer_call(ran, source)
    known = set(call.overrides)
    further = [text for text in arguments if "=" in text and text not in known]
    call = replace(call, overrides=(*call.overrides, *further))
    made = ported(str(source), call, [], source.parent)
    return replace(made, beside=[*beside, *made.beside], refused=ran.refused)


def ported(source: str, call: TrainerCall, base: list[Setting], folder: Path = Path()) -> Ported:
    """Translate a call of a trainer. base: settings before its arguments. folder: where its files may be."""
    notes: list[Note] = []
    file = call.config_file
    if file is not None:
        places = [place for place in (file, folder / file) if place.is_file()]
        if places:
            base = [*base, *_file_settings(places[0])]
        else:
            setting = Setting("config-name", str(file), source, prefix="--")
            reason = "this file does not exist: give its settings as arguments, or port it"
            notes.append(Note(Kind.UNSUPPORTED, setting, reason, feature="a configuration file that does not exist"))
    named = [setting for setting in base if setting.key == DEFAULTS]
    base = [setting for setting in base if setting.key != DEFAULTS]
    implied = call.entry
    if isinstance(implied, str):
        setting = Setting("program", call.program, source)
        notes.append(Note(Kind.UNSUPPORTED, setting, "train with verl.trainer.main_ppo's keys", feature=implied))
        implied = []
    given = [*base, *(setting for text in (*implied, *call.overrides) for setting in read_override(text))]
    translation = translate(given, is_key)
    known = [setting for setting in translation.settings if is_key(setting.key)]
    unknown = [setting for setting in translation.settings if not is_key(setting.key)]
    known, added = resolve_defaults(known)
    notes = [*translation.notes, *added, *meanings(known), *notes, *(_unknown(setting) for setting in unknown)]
    refused = [note.setting for note in notes if note.kind is Kind.UNSUPPORTED and note.setting.key not in OPTIONS]
    final, _ = final_settings([*known, *refused])
    beside = [*unread_words(call), *_unread_files(named)]
    settings = [*defaults(final), *final]
    config = read_settings(settings).config
    apart = [] if config is None else [str(problem) for problem in feature_problems(config)]
    return Ported(source, settings, notes, unread_models(known), beside, apart=apart)


OPTIONS = ("config-name", "program")
DEFAULTS = "defaults"
"""Hydra's list of the files that a file is made of."""


def _unread_files(named: list[Setting]) -> list[str]:
    """Return a line for each list of files that a file is made of, with those that are not verl's own."""
    lines = []
    for setting in named:
        listed = setting.value if isinstance(setting.value, list) else [setting.value]
        files = [one for one in listed if isinstance(one, str) and one not in ("_self_", *DEFAULT_CONFIGS)]
        if files:
            lines.append(f"files that {setting.origin} is made of: {', '.join(files)}; port their settings, too")
    return lines


def _unknown(setting: Setting) -> Note:
    like = suggested_key(setting.key)
    reason = f"is {like} meant?" if like else "leave it out where it only changes speed"
    return Note(Kind.UNSUPPORTED, setting, reason, feature=f"the key {setting.key}, which is in no table")


def _file_settings(file: Path) -> list[Setting]:
    """Read verl's YAML with its interpolations resolved where possible, without Hydra's own groups."""
    tree = read_yaml(file, is_resolved=True)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}; it must hold groups of keys")
    groups = {str(name): value for name, value in tree.items() if name != "hydra"}
    return [setting for setting in settings_of(groups, str(file)) if setting.value not in ("???", TAKEN_AWAY)]
