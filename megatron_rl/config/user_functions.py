"""Functions and classes from a Python file of the user's: which there are, read without running it, and one of them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.config.problems import missing_file, refused
from megatron_rl.errors import ConfigError, RewardError, Violation
from megatron_rl.plain_values import describe_error


def functions_in(path: str, key: str) -> list[str]:
    """Names of the functions defined at the top of the file; as `definitions_in`."""
    return definitions_in(path, key, ast.FunctionDef)


def definitions_in(path: str, key: str, *kinds: type[ast.stmt]) -> list[str]:
    """Names of what is defined at the top of the file, which is only parsed. kinds: `ast.FunctionDef`,
    `ast.AsyncFunctionDef`, `ast.ClassDef`.

    Raises ConfigError, naming the configuration key `key`, when it is missing or is no Python.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise refused(missing_file(key, path, file, (".py",)))
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        raise refused(Violation({key: path}, f"must be a Python file: {error}")) from error
    return [str(vars(node)["name"]) for node in tree.body if isinstance(node, kinds)]


def load_function(
    path: str, key: str, name: str, arguments: tuple[str, ...], may_be_async: bool = False, kwargs: Collection[str] = ()
) -> Callable[..., Any]:
    """Run the file and return its function `name`, which must take as many positional arguments as `arguments` names,
    and those of `kwargs` by their names.

    Raises ConfigError, naming the configuration key `key`, when the file fails to run or has no such function.
    """
    names = definitions_in(path, key, ast.FunctionDef, *([ast.AsyncFunctionDef] if may_be_async else []))
    if name not in names:
        listing = ", ".join(names) or "no function"
        raise ConfigError(f"{key}={path} must define the function {name}; it defines {listing}")
    function: Callable[..., Any] = vars(run_file(path, key))[name]
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(kwargs))
    except TypeError as error:
        wanted = f"{name}({', '.join([*arguments, *(f'{keyword}=...' for keyword in kwargs)])})"
        raise ConfigError(f"{key}={path}: {name}{inspect.signature(function)} must be callable as {wanted}") from error
    return function


def load_class(path: str, key: str, name: str, methods: tuple[str, ...], kwargs: Collection[str] | None = None) -> type:
    """Run the file and return its class `name`, which must have `methods`. kwargs: names that its constructor must
    take, and no others.

    Raises ConfigError, naming the configuration key `key`, when the file fails to run or has no such class.
    """
    names = definitions_in(path, key, ast.ClassDef)
    if name not in names:
        raise ConfigError(f"{key}={path} must define the class {name}; it defines {', '.join(names) or 'no class'}")
    user_class: type = vars(run_file(path, key))[name]
    lacking = [method for method in methods if not callable(getattr(user_class, method, None))]
    if lacking:
        raise ConfigError(f"{key}={path}: {name} must have the methods {', '.join(methods)}; it has no {lacking[0]}")
    try:
        signature = inspect.signature(user_class) if kwargs is not None else None
    except ValueError:  # Python has no code of this class
        return user_class
    try:
        if signature is not None:
            signature.bind(**dict.fromkeys(kwargs or ()))
    except TypeError as error:
        raise ConfigError(f"{key}={path}: kwargs must be arguments of {name}: {error}; it takes {signature}") from None
    return user_class


@contextmanager
def reward_errors(what: str) -> Iterator[None]:
    """Make a RewardError of whatever an object of the user's raises inside. what: names it in the message."""
    try:
        yield
    except Exception as error:
        raise RewardError(f"{what} raised {describe_error(error)}") from error


def run_file(path: str, key: str) -> ModuleType:
    """Run a Python file as a module. Raises ConfigError, naming the configuration key `key`, when it is missing, is no
    Python file, or fails to run, by `sys.exit` too.
    """
    file = Path(path).expanduser()
    name = f"{key.replace('.', '_')}_{file.stem}"  # a file that two keys name is run for each
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise refused(missing_file(key, path, file, (".py",)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles in the file look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ConfigError(f"{key}={path} fails to run: {describe_error(error)}") from error
        raise
    return module
