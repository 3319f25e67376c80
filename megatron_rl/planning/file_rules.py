"""Rules of the files and folders that a run reads and writes: prompts with their columns, reward function, outputs."""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.output_paths import checkpoint_round, path_outside
from megatron_rl.checkpoint.score_statistics import StatisticsError, read_statistics
from megatron_rl.config.adapter_files import file_of, interpreter_problem
from megatron_rl.config.algorithm_keys import FilterGroupsConfig
from megatron_rl.config.algorithms import trains_on_rule, uses_rule
from megatron_rl.config.keys import default_of, leaves_of, type_of, value_of
from megatron_rl.config.multi_turn import AgentConfig, EnvironmentConfig
from megatron_rl.config.problems import missing_file, nearest_name, refused
from megatron_rl.config.reward_keys import HELD_OUT, RUNNING, CustomRewardFunctionConfig
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import DataConfig, PromptSamplerConfig, RunConfig, as_list
from megatron_rl.config.synonyms import PROMPTS, SOURCES, TRUTHS, suggested_column
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.config.user_functions import definitions_in
from megatron_rl.config.validate import REWARD_ARGUMENTS, is_path_or_paths
from megatron_rl.data.row_files import NOT_TEXT, column_forms, count_rows
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.observe.services import PACKAGES, absent_services
from megatron_rl.planning.hardware import load_hardware

ASKED = "name the column with the prompt"
NAMED = (
    "set data.default_data_source to the name of where the rows are from, which chooses the reward function, such as "
    "data.default_data_source=openai/gsm8k"
)
TOLD = "or null, if the reward function needs none"
PROMPT_SUFFIXES = (".parquet", ".jsonl")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UserDefinition = EnvironmentConfig | AgentConfig | PromptSamplerConfig | FilterGroupsConfig
GROUP_FUNCTION = "compute_group_scores"
"""The usual name of a reward function with custom_reward_function.per_group."""
TURNS = "actor_rollout_ref.rollout.multi_turn"
INTERPRETER = f"{TURNS}.python"
FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
OUTPUTS = (*FOLDERS, "data.bad_rows_file", "ptx.bad_rows_file")
"""Keys of folders and files that a run writes."""


def file_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation. The user's code is parsed, never run. Prompt files are opened for their columns; the files of a
    task without generation are only looked up.
    """
    if not config.generates:
        for key, paths in prompt_files(config):
            yield from _missing_files(key, paths)
    else:
        judged = {"data.train_files": trains_on_rule(config), "data.val_files": uses_rule(config)}
        yield from prompt_problems(config, [key for key, is_judged in judged.items() if is_judged])
        yield from reward_function_problems(config.custom_reward_function)
        yield from _sampler_problems(config.data)
        yield from filter_problems(config.algorithm.filter_groups)
        if config.has_turns:
            turns = config.actor_rollout_ref.rollout.multi_turn
            yield from _definition_problems(f"{TURNS}.environment", turns.environment, "class", ast.ClassDef)
            yield from _definition_problems(f"{TURNS}.agent", turns.agent, "function", *FUNCTIONS)
            yield from _command_problems(f"{TURNS}.agent.command", turns.agent.command)
            wrong = None if turns.python is None else interpreter_problem(turns.python, INTERPRETER)
            yield from () if wrong is None else (wrong,)
            key, tools = turns.tools_file or ("", None)
            suffixes = (".py",) if key == "function_tool_path" else (".yaml", ".yml")
            wrong = None if tools is None else _wrong_file(f"{TURNS}.{key}", tools, suffixes)
            yield from () if wrong is None else (wrong,)
        yield from statistics_problems(config)
    yield from _folder_problems(config.trainer)
    yield from _checkpoint_problems(config)
    yield from _logger_problems(config.trainer)


def pretraining_file_problems(config: RunConfig) -> Iterable[Violation]:
    """`ptx.files`, which must be a path or a list of paths. Their content is checked when they are read."""
    yield from _missing_files("ptx.files", as_list(config.ptx.files))


def _missing_files(key: str, paths: list[str]) -> Iterator[Violation]:
    for path in paths:
        wrong = _wrong_file(key, path, PROMPT_SUFFIXES)
        if wrong is not None:
            yield _within_list(wrong, key, path, paths)


def tracker_notes(trainer: TrainerConfig) -> list[str]:
    """Return a line for each tracker that is not installed here, for plans that do not look at this machine's files."""
    return [
        f"trainer.logger names {name}, which is not installed here, and a run would be refused; "
        f"try: pip install {PACKAGES.get(name, name)}"
        for name in absent_services(trainer.logger)
    ]


def _logger_problems(trainer: TrainerConfig) -> Iterable[Violation]:
    for name in absent_services(trainer.logger):
        others = [other for other in trainer.logger if other != name] or ["console"]
        rule = f"names {name}, which is not installed"
        install = f"or: pip install {PACKAGES.get(name, name)}"
        yield Violation({"trainer.logger": trainer.logger}, rule, {"trainer.logger": others}, install)


def statistics_problems(config: RunConfig) -> Iterable[Violation]:
    """Reward models whose folder does not have the statistics that normalize_reward=held_out needs."""
    for role in roles_of(config):
        if not role.kind.gives_reward or role.model_path is None or role.settings.normalize_reward != HELD_OUT:
            continue
        folder = Path(role.model_path).expanduser()
        if not folder.is_dir():
            continue  # the folder's own rules report it
        try:
            read_statistics(folder)
        except StatisticsError as error:
            key = f"{role.key}.normalize_reward"
            rule = f"needs the mean and spread of held-out scores in {role.model_key}={role.model_path}: {error}"
            hint = "megatron-rl reward writes them into the folder of the model that it exports"
            yield Violation({key: HELD_OUT}, rule, {key: RUNNING}, hint)


def hardware_problems(file: str | None) -> Iterable[Violation]:
    """A hardware file that cannot be used."""
    if file is None:
        return
    key = "trainer.hardware_file"
    try:
        load_hardware(file)
    except ConfigError as error:
        yield Violation({key: file}, f"must be a hardware file: {error}", {key: None})


def prompt_files(config: RunConfig) -> list[tuple[str, list[str]]]:
    """(key, paths) of training and held-out prompts; in an evaluation, which has others for both, of the latter.

    Another rule reports values without paths.
    """
    data = config.data
    values = [("data.val_files", data.val_files)]
    if not config.trainer.val_only:
        values.insert(0, ("data.train_files", data.train_files))
    return [(key, as_list(files)) for key, files in values if is_path_or_paths(files)]


def train_rows(data: DataConfig) -> list[int]:
    """Rows of each of data.train_files, counted up to one batch; a missing file counts as one full batch.

    With train_max_samples one number for all files, unless these have weights.
    """
    batch, rows = data.gen_batch_size, []
    for path in as_list(data.train_files):
        try:
            rows.append(count_rows(path, batch))
        except (ConfigError, OSError):
            rows.append(batch)
    if data.train_max_samples > 0 and data.train_file_weights is None:
        return [min(sum(rows), data.train_max_samples)]
    return rows


def columns_not_text(path: str) -> list[str]:
    """Return the columns of a file for images, videos or sounds; none where it cannot be read."""
    try:
        return [name for name in column_forms(path, first_row_only=True) if name in NOT_TEXT]
    except (ConfigError, OSError):
        return []


def prompt_problems(config: RunConfig, judged: Sequence[str]) -> Iterable[Violation]:
    """Return every violation of the files of prompts. judged: keys of the files whose rows need a ground truth."""
    data = config.data
    tables: dict[str, dict[str, str]] = {}
    for key, paths in prompt_files(config):
        for path in paths:
            wrong = _wrong_file(key, path, PROMPT_SUFFIXES)
            if wrong is None:
                try:
                    tables[path] = column_forms(path, first_row_only=True)
                except ConfigError as error:
                    wrong = Violation({key: path}, f"must be a file of prompts: {error}")
            if wrong is not None:
                yield _within_list(wrong, key, path, paths)
    scored = {
        path: tables[path] for key, paths in prompt_files(config) if key in judged for path in paths if path in tables
    }
    yield from _column_problems("data.prompt_key", data.prompt_key, tables, PROMPT_COLUMN)
    needing = scored if data.default_data_source is None else {}
    named = {path for path, columns in tables.items() if columns.get(data.reward_fn_key, "null") != "null"}
    sourced = {path: columns for path, columns in tables.items() if path in needing or path in named}
    yield from _column_problems("data.reward_fn_key", data.reward_fn_key, sourced, SOURCE_COLUMN)
    truth = data.ground_truth_key
    lacking = [path for path, columns in scored.items() if truth and columns.get(truth, "null") == "null"]
    if lacking:
        names = [name for name, form in scored[lacking[0]].items() if form != "null" and "." not in name]
        like = suggested_column(truth or "", TRUTHS, [name for name in names if name != data.prompt_key])
        rule = f"must be a column with the expected answer, or a field of one; {lacking[0]} has {', '.join(names)}"
        nearest = {} if like is None else {"data.ground_truth_key": like}
        yield Violation({"data.ground_truth_key": truth}, rule, nearest, "" if nearest else TOLD, wrong_name=True)


@dataclass(frozen=True)
class PromptColumn:
    """What a column of prompt files must be. forms: see `column_forms`. usual: its usual names. hint: if none fits."""

    forms: tuple[str, ...]
    meaning: str
    usual: tuple[str, ...]
    hint: str


PROMPT_COLUMN = PromptColumn(("text", "messages"), "text or a list of {role, content}", PROMPTS, ASKED)
SOURCE_COLUMN = PromptColumn(("text",), "text", SOURCES, NAMED)


def _column_problems(
    key: str, column: str, tables: Mapping[str, Mapping[str, str]], wanted: PromptColumn
) -> Iterable[Violation]:
    """tables: path -> column -> form."""
    lacking = [path for path, columns in tables.items() if columns.get(column) not in wanted.forms]
    if lacking:
        able = [{name for name, form in columns.items() if form in wanted.forms} for columns in tables.values()]
        names = sorted(set.intersection(*able))
        has = ", ".join(f"{name} ({form})" for name, form in tables[lacking[0]].items())
        like = suggested_column(column, wanted.usual, names)
        nearest, lacks = ({}, wanted.hint) if like is None else ({key: like}, "")
        rule = f"must be a column of {wanted.meaning}; {lacking[0]} has {has}"
        # With a subject of its own the message ends with a whole override, which can be pasted.
        yield Violation({key: column}, rule, nearest, lacks, subject=f"{key}={column}")


def _within_list(wrong: Violation, key: str, path: str, paths: list[str]) -> Violation:
    """If `key` holds several files, suggest all of them with one replaced."""
    if len(paths) == 1 or key not in wrong.nearest:
        return wrong
    replaced = [wrong.nearest[key] if other == path else other for other in paths]
    return Violation(wrong.settings, wrong.rule, {key: replaced}, wrong.hint, wrong_name=wrong.wrong_name)


def _wrong_file(key: str, path: str, suffixes: tuple[str, ...]) -> Violation | None:
    file = Path(path).expanduser()
    if not file.is_file():
        return missing_file(key, path, file, suffixes)
    if file.suffix not in suffixes:
        kind = " or ".join(suffixes)
        return Violation(
            {key: path}, f"must be a {kind} file, by its name", hint=f"rename it to {file.stem}{suffixes[0]}"
        )
    return None


def reward_function_problems(custom: CustomRewardFunctionConfig) -> Iterable[Violation]:
    """The file, the imports at its top, and the function in it."""
    key = "custom_reward_function.path"
    if custom.path is None or custom.name is None:
        return
    wrong = _wrong_file(key, custom.path, (".py",))
    if wrong is not None:
        yield wrong
        return
    try:
        tree = ast.parse(Path(custom.path).expanduser().read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield Violation({key: custom.path}, f"must be a Python file: {error}")
        return
    for module in sorted({name.partition(".")[0] for name in _imported(tree)}):
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            yield Violation({key: custom.path}, f"imports {module}, which is not installed")
    names = dict(_defined(tree))
    if "*" in names:
        return  # what a star import brings is known when the file is run
    if custom.name not in names:
        rule = f"must be a function of {custom.path}"
        functions = [name for name, node in names.items() if isinstance(node, FUNCTIONS)]
        nearest: dict[str, Any] = {}
        if functions:
            nearest["custom_reward_function.name"] = nearest_name(custom.name, functions)
        if nearest == {"custom_reward_function.name": GROUP_FUNCTION} and not custom.per_group:
            nearest["custom_reward_function.per_group"] = True
        hint = "" if functions else "it defines none"
        yield Violation({"custom_reward_function.name": custom.name}, rule, nearest, hint, wrong_name=True)
        return
    function = names[custom.name]
    if isinstance(function, FUNCTIONS):
        yield from _signature_problems(custom, function)


def _command_problems(key: str, command: list[str] | None) -> Iterable[Violation]:
    """A command whose program does not exist."""
    if command and shutil.which(command[0]) is None:
        rule = "must begin with a program that exists"
        yield Violation({key: command}, rule, {key: None}, f"{command[0]} is not found, or may not be executed")


def _sampler_problems(data: DataConfig) -> Iterable[Violation]:
    yield from _definition_problems("data.sampler", data.sampler, "class", ast.ClassDef)
    if data.sampler.path is not None and data.train_file_weights is not None:
        shares = {"data.sampler.path": data.sampler.path, "data.train_file_weights": data.train_file_weights}
        rule = "do not go together: the class chooses from the prompts of all files"
        yield Violation(shares, rule, {"data.train_file_weights": None})


def filter_problems(keys: FilterGroupsConfig) -> Iterable[Violation]:
    """The user's verdict on groups."""
    key = "algorithm.filter_groups"
    yield from _definition_problems(key, keys, "function", ast.FunctionDef)
    if keys.path is not None and not keys.enable:
        settings = {f"{key}.path": keys.path, f"{key}.enable": False}
        yield Violation(settings, "do not go together: nothing is filtered", {f"{key}.enable": True})


def _definition_problems(group: str, keys: UserDefinition, what: str, *kinds: type[ast.stmt]) -> Iterable[Violation]:
    """The file `path`, and the class or function `name` in it."""
    key, name_key, path, name = f"{group}.path", f"{group}.name", keys.path, keys.name
    if path is None:
        return
    try:
        path = file_of(path, key)
    except ConfigError as error:
        yield from error.violations
        return
    wrong = _wrong_file(key, path, (".py",))
    if wrong is not None:
        yield wrong
        return
    try:
        names = definitions_in(path, key, *kinds)
    except ConfigError as error:
        yield from error.violations
        return
    if name not in names:
        nearest = {name_key: nearest_name(name, names)} if names else {}
        hint = "" if names else "it defines none"
        yield Violation({name_key: name}, f"must be a {what} of {path}", nearest, hint, wrong_name=True)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules that the file imports when it is run, except in a `try`."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Names that the file defines at its top, branches included, with the statement that defines each."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.col_offset == 0:
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))


def _signature_problems(
    custom: CustomRewardFunctionConfig, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterable[Violation]:
    arguments = function.args
    if custom.per_group:
        yield from _group_signature_problems(custom, function)
        return
    given = REWARD_ARGUMENTS | set(custom.reward_kwargs)
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    required = [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if not default
    ]
    required += [argument.arg for argument in arguments.posonlyargs]
    missing = sorted(set(required) - given)
    unknown = [] if arguments.kwarg else sorted(given - set(named))
    if missing or unknown:
        takes = f"{function.name}({ast.unparse(arguments)})"
        wanted = ", ".join(sorted(given))
        rule = f"must take the keywords {wanted}; {takes} in {custom.path} does not"
        of_groups = {"custom_reward_function.per_group": True} if named[:1] == ["rows"] else {}
        yield Violation({"custom_reward_function.name": custom.name}, rule, of_groups)


def _group_signature_problems(
    custom: CustomRewardFunctionConfig, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterable[Violation]:
    """A function of groups takes the rows by position, and reward_kwargs by name."""
    arguments = function.args
    by_place = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = set(by_place[1 : len(by_place) - len(arguments.defaults)])
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required |= {argument.arg for argument, default in defaults if default is None}
    named = {argument.arg for argument in (*arguments.args[0 if arguments.posonlyargs else 1 :], *arguments.kwonlyargs)}
    given = set(custom.reward_kwargs)
    has_rows = bool(by_place) or arguments.vararg is not None
    if not has_rows or required - given or (given - named and not arguments.kwarg):
        takes = f"{function.name}({ast.unparse(arguments)})"
        wanted = ", ".join(("rows", *sorted(given)))
        rule = (
            f"must, with custom_reward_function.per_group=true, be callable as {custom.name}({wanted}); {takes} is not"
        )
        is_of_responses = set(by_place) >= REWARD_ARGUMENTS - {"extra_info"}
        nearest = {"custom_reward_function.per_group": False} if is_of_responses else {}
        yield Violation({"custom_reward_function.name": custom.name}, rule, nearest)


def path_problems(config: RunConfig) -> Iterator[Violation]:
    """Paths that cannot be looked up: too long, in an unknown user's home, in a folder without permission.

    After one of these no other rule can look at files.
    """
    for key in (key for key, leaf in leaves_of(config) if leaf.is_path):
        paths = value_of(config, key)
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list) else ():
            if not isinstance(path, str):
                continue  # its own rule reports it
            if not path.strip() and not key.endswith("files"):  # files have a rule of their own
                default = default_of(key)
                nearest = {} if default is None and type_of(key) is str else {key: default}
                yield Violation({key: path}, "must be a path, and is empty", nearest)
                continue
            try:
                Path(path).expanduser().stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, RuntimeError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                yield Violation({key: path}, f"must be a path that can be looked at: {reason}")


def _folder_problems(trainer: TrainerConfig) -> Iterable[Violation]:
    """Folders to write to: each exists or can be made, and none is a file."""
    for key, path in _output_folders(trainer):
        folder = Path(path)
        above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not above.is_dir():
            rule = "must be a folder, and it is a file"
            if above != folder:
                rule = f"must be a folder, and {above} is a file"
            yield Violation({key: path}, rule, {key: f"{above}.run"})
        elif not os.access(above, os.W_OK | os.X_OK):
            yield Violation({key: path}, f"must be a folder that can be written, and {above} cannot")


def _checkpoint_problems(config: RunConfig) -> Iterable[Violation]:
    """Outputs inside a complete checkpoint, which must not change."""
    for key in OUTPUTS:
        path = value_of(config, key)
        checkpoint = checkpoint_round(Path(path)) if isinstance(path, str) else None
        if checkpoint is not None:
            rule = f"must not be inside of a checkpoint, {checkpoint}"
            yield Violation({key: path}, rule, {key: str(path_outside(checkpoint, Path(path)))})


def make_folders(trainer: TrainerConfig) -> None:
    """Make the folders that a run writes to, and try to write a file in each, before any process starts.

    Raises ConfigError if that fails. Preflight cannot see every such failure.
    """
    for key, path in _output_folders(trainer):
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # the run reports a full disk with more detail
            rule = f"must be a folder that can be created and written: {error.strerror}"
            raise refused(Violation({key: path}, rule)) from error


def _output_folders(trainer: TrainerConfig) -> list[tuple[str, str]]:
    paths = (trainer.default_local_dir, trainer.rollout_data_dir, trainer.validation_data_dir)
    return [(key, path) for key, path in zip(FOLDERS, paths, strict=True) if path is not None]
