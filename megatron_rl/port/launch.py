"""The trainer among all programs that a script would start, and its arguments."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from megatron_rl.errors import ConfigError
from megatron_rl.port.shell import Launch, ShellRun

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
    """A call of a trainer. program: its module or file, "" where only arguments are known. overrides: Hydra's. options:
    its `--` options. unread: its other words. launch, around: the call of a program that it is a part of, and the words
    of that before the trainer.
    """

    program: str
    overrides: tuple[str, ...]
    options: dict[str, str]
    unread: tuple[str, ...] = ()
    launch: Launch | None = None
    around: tuple[str, ...] = ()

    @property
    def entry(self) -> str | list[str]:
        """The name of a program that is not here, or the overrides that follow from a trainer that is."""
        for pattern, entry in entries().items():
            if self.program and fnmatch.fnmatch(self.program, pattern):
                return entry or []
        return f"the program {self.program}" if self.program else []

    @property
    def config_file(self) -> Path | None:
        """The file that Hydra's options name; None for verl's own files, whose values are defaults."""
        name, folder = self.options.get("config-name"), self.options.get("config-path", "")
        if name is None:
            return None
        name = name.removesuffix(".yaml")
        file = Path(folder) / f"{name}.yaml"
        return None if name in DEFAULT_CONFIGS and not (folder and file.is_file()) else file


@cache
def entries() -> dict[str, str | list[str] | None]:
    """Pattern of a program -> the name of a feature that is not here, overrides that follow, or None."""
    return dict(yaml.safe_load((Path(__file__).parent / "entries.yaml").read_text()))


def trainer_call(ran: ShellRun, script: Path) -> tuple[TrainerCall, list[str]]:
    """Return the call with the most Hydra arguments, and what else the script does, a line each.

    Raises ConfigError where no call has any.
    """
    calls = [replace(call, launch=launch) for launch in ran.launches for call in _calls_in(launch.arguments)]
    calls = [call for call in calls if any("=" in override for override in call.overrides)]
    if not calls:
        names = ", ".join(dict.fromkeys(launch.name for launch in ran.launches)) or "nothing"
        refused = f"{ran.refused[0]} (--trust-script permits it, where you trust it); " if ran.refused else ""
        raise ConfigError(
            f"{script} starts no trainer with Hydra arguments (it calls {names}); {refused}give them themselves: "
            "megatron-rl port -- KEY=VALUE ..."
        )
    taken = max(calls, key=lambda call: len(call.overrides))
    return taken, list(_beside(ran, taken, [call for call in calls if call is not taken]))


READ_OPTIONS = ("config-name", "config-path")
SILENT = {
    *"chmod cp hostname install kill ln mkdir mktemp mv nvidia-smi pkill rm rmdir sleep tee touch ulimit wait".split()
}
"""Programs that prepare a launch and change nothing about a run."""


def _beside(ran: ShellRun, taken: TrainerCall, others: list[TrainerCall]) -> Iterator[str]:
    """Yield what a script does that no configuration can hold. Values are left out: they may be secrets."""
    exports = {word.partition("=")[0] for word in taken.around if re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL)}
    exports |= set(taken.launch.exports) if taken.launch is not None else set()
    if exports:
        yield f"exported variables: {', '.join(sorted(exports))}; export those that a run needs where you start it"
    around = _around(taken)
    if around:
        yield f"around the trainer: {around}; to start a run see docs/start/coming_from_verl.md"
    for other in others:
        yield f"another call of a trainer: {other.program}, which is left out; port its arguments by themselves"
    trained = [taken.launch, *(other.launch for other in others)]
    programs = [
        _program(one) for one in ran.launches if one.name not in SILENT and all(one is not it for it in trained)
    ]
    if programs:
        yield f"other programs that it calls: {', '.join(dict.fromkeys(programs))}"


def unread_words(call: TrainerCall) -> list[str]:
    """Return a line on the words of a trainer's command that set nothing, if there are any."""
    words = [f"--{name}" for name in call.options if name not in READ_OPTIONS] + [*call.unread]
    shown = ", ".join(f"{word:.40}" for word in words[:5])
    return [f"{len(words)} words of the trainer's command that are no settings: {shown}"] if words else []


def _around(call: TrainerCall) -> str:
    """Return the program that starts a trainer's Python, with the names of its options; "" for Python itself."""
    launch = call.launch
    words = [] if launch is None else [launch.name, *call.around]
    while words and re.fullmatch(r"(?:.*/)?python[\d.]*|-[a-zA-Z]|--", words[-1]):
        words.pop()
    if not words or (len(words) == 1 and words[0] in QUIET_STARTERS):
        return ""
    bare = [word for word in words[:3] if re.fullmatch(r"[a-z]+", word)]
    options = [word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word)]
    return " ".join(bare) + (f" with {', '.join(dict.fromkeys(options))}" if options else "")


QUIET_STARTERS = ("nohup", "setsid", "exec", "env", "sudo")


def _program(launch: Launch) -> str:
    """Return a program's name, with the first word of those that are many programs in one."""
    first = launch.arguments[0] if launch.arguments else ""
    return f"{launch.name} {first}" if re.fullmatch(r"[a-z][\w-]*(\.py)?|[\w./-]+\.(py|sh)", first) else launch.name


def call_of(arguments: Sequence[str], program: str = "") -> TrainerCall:
    """Separate Hydra's overrides and options. Raises ConfigError for an argument that is neither."""
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
    """Find calls of Python in a command line, also after a launcher, or in a line of shell inside it."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            yield replace(_lenient(words[place + 2 :], words[place + 1]), around=tuple(words[:place]))
            return
        if word.endswith(".py"):
            yield replace(_lenient(words[place + 1 :], word), around=tuple(words[:place]))
            return
        if " " in word and "main" in word and "=" in word:
            try:
                yield from _calls_in(shlex.split(word))
            except ValueError:
                continue


def _lenient(words: Sequence[str], program: str) -> TrainerCall:
    """Read a call without words that are no arguments, such as marks of comments."""
    kept: list[str] = []
    unread: list[str] = []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        is_value = before in SHORT_OPTIONS or (before.startswith("--config") and "=" not in before)
        is_argument = "=" in word and HYDRA_ARGUMENT.fullmatch(word) is not None
        (kept if word.startswith(("-", "~")) or is_value or is_argument else unread).append(word)
    return replace(call_of(kept, program), unread=tuple(word for word in unread if word.strip()))
