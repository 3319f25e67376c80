"""Of everything that a script would start: the trainer, and the arguments that it is given."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from megatron_rl.errors import ConfigError
from megatron_rl.port.shell import ShellRun

HYDRA_ARGUMENT = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w@/]*(\.[\w@/-]+)*(=.*)?", re.DOTALL)
SHORT_OPTIONS = {"-cn": "config-name", "-cp": "config-path", "-cd": "config-dir"}
DEFAULT_CONFIGS = tuple(
    f"{kind}{engine}trainer"
    for kind in ("ppo_", "dapo_", "fully_async_ppo_", "one_step_off_ppo_")
    for engine in ("", "megatron_")
)
"""Names of verl's own configuration files, whose values are its defaults."""


@dataclass(frozen=True)
class TrainerCall:
    """program: the module or file, "" where only arguments are known. overrides: Hydra's. options: its `--` options."""

    program: str
    overrides: tuple[str, ...]
    options: dict[str, str]

    @property
    def feature(self) -> str | None:
        """What the program is where it is no trainer of verl's that this one stands for."""
        entry = self._entry
        return entry if isinstance(entry, str) else None

    @property
    def implied(self) -> list[str]:
        """Overrides that say what the program is."""
        entry = self._entry
        return entry if isinstance(entry, list) else []

    @property
    def _entry(self) -> str | list[str] | None:
        for pattern, entry in entries().items():
            if self.program and fnmatch.fnmatch(self.program, pattern):
                return entry
        return f"the program {self.program}" if self.program else None

    @property
    def config_file(self) -> Path | None:
        """The file that Hydra's options name, where it is none of verl's own."""
        name, folder = self.options.get("config-name"), self.options.get("config-path", "")
        if name is None:
            return None
        name = name.removesuffix(".yaml")
        file = Path(folder) / f"{name}.yaml"
        return None if name in DEFAULT_CONFIGS and not (folder and file.is_file()) else file


@cache
def entries() -> dict[str, str | list[str] | None]:
    """Pattern of a program -> the feature that it is, or overrides that say it; None where there is nothing to say."""
    return dict(yaml.safe_load((Path(__file__).parent / "entries.yaml").read_text()))


def trainer_call(ran: ShellRun, script: Path) -> TrainerCall:
    """The call with the most Hydra arguments. Raises ConfigError where no call has any."""
    found = [call for launch in ran.launches for call in _calls_in(launch.arguments)]
    found = [call for call in found if any("=" in one for one in call.overrides)]
    if not found:
        names = ", ".join(dict.fromkeys(launch.name for launch in ran.launches)) or "nothing"
        refused = f"{ran.refused[0]} (--trust-script permits it, where you trust it); " if ran.refused else ""
        raise ConfigError(
            f"{script} starts no trainer with Hydra arguments (it calls {names}); {refused}give them themselves: "
            "megatron-rl port -- KEY=VALUE ..."
        )
    return max(found, key=lambda call: len(call.overrides))


def call_of(arguments: Sequence[str], program: str = "") -> TrainerCall:
    """Hydra's arguments and options, told apart. Raises ConfigError for one that is neither."""
    overrides, options, place = [], {}, 0
    words = list(arguments)
    while place < len(words):
        word = words[place]
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if not equals and name.startswith("config"):
                place += 1
                value = words[place] if place < len(words) else ""
            options[name] = value
        elif word in SHORT_OPTIONS and place + 1 < len(words):
            place += 1
            options[SHORT_OPTIONS[word]] = words[place]
        elif HYDRA_ARGUMENT.fullmatch(word) and ("=" in word or word.startswith("~")):
            overrides.append(word)
        elif word.strip():
            raise ConfigError(f"argument {word!r} is no KEY=VALUE: quote values with blanks")
        place += 1
    return TrainerCall(program, tuple(overrides), options)


def _calls_in(words: Sequence[str]) -> Iterator[TrainerCall]:
    """Calls of Python in a command line, also behind a launcher, or in a line of shell within it."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            yield _lenient(words[place + 2 :], words[place + 1])
            return
        if word.endswith(".py"):
            yield _lenient(words[place + 1 :], word)
            return
        if " " in word and "main" in word and "=" in word:
            try:
                yield from _calls_in(shlex.split(word))
            except ValueError:
                continue


def _lenient(words: Sequence[str], program: str) -> TrainerCall:
    """Without what a shell has left beside the arguments, such as marks of comments."""
    kept = []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        is_value = before in SHORT_OPTIONS or (before.startswith("--config") and "=" not in before)
        is_argument = "=" in word and HYDRA_ARGUMENT.fullmatch(word) is not None
        if word.startswith(("-", "~")) or is_value or is_argument:
            kept.append(word)
    return call_of(kept, program)
