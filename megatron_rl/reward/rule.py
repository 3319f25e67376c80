"""Rule rewards: a Python function from the user's file, called once per decoded answer."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import Generations, Prompts

RewardFunction = Callable[..., Any]

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None)"
LONGEST_QUOTE = 200


def load_reward_function(path: str, name: str) -> RewardFunction:
    """The function `name` of the Python file `path`.

    Raises ConfigError if the file is missing or fails to run, has no such function, or if the function cannot be
    called with the keywords data_source, solution_str, ground_truth, extra_info.
    """
    module = _run_file(path)
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        nearest = nearest_name(name, functions) if functions else None
        hint = f"the nearest function there is {nearest!r}" if nearest else "it defines no function"
        raise ConfigError(f"{path} has no function {name!r} (custom_reward_function.name): {hint}")
    function = functions[name]
    signature = inspect.signature(function)
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as error:
        raise ConfigError(
            f"{path}: {name}{signature} cannot be called with the keywords of {name}{SIGNATURE}: {error}"
        ) from error
    return function


class RuleReward:
    """Scores decoded answers with a function such as `load_reward_function` returns."""

    def __init__(self, function: RewardFunction, tokenizer: PreTrainedTokenizerBase):
        """`function` returns a number, or a dict with a number under "score"."""
        self.function = function
        self.tokenizer = tokenizer

    def __call__(self, prompts: Prompts, generations: Generations) -> torch.Tensor:
        """Scores float32 [B] of B answers, special tokens (EOS, padding) removed from their text.

        Raises RewardError, naming the sample, if the function raises or returns anything but a finite number.
        """
        response_ids = [row.tolist() for row in generations.response_ids.unbind()]
        solutions = self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        columns = (prompts.index.tolist(), prompts.data_source, solutions, prompts.ground_truth, prompts.extra_info)
        return torch.tensor([self._score(*row) for row in zip(*columns, strict=True)], dtype=torch.float32)

    def _score(self, index: int, data_source: str, solution: str, ground_truth: str, extra_info: dict) -> float:
        sample = f"prompt {index} of data source {data_source!r}, answer {_quote(solution)}"
        try:
            result = self.function(
                data_source=data_source, solution_str=solution, ground_truth=ground_truth, extra_info=extra_info
            )
        except Exception as error:
            raise RewardError(f"the reward function raised {type(error).__name__}: {error} ({sample})") from error
        score = result.get("score") if isinstance(result, dict) else result
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            raise RewardError(
                f"the reward function returned {_quote(result)}; it must return a finite number, "
                f"or a dict with one under 'score' ({sample})"
            )
        return float(score)


def _run_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        neighbours = [str(other) for other in file.parent.glob("*.py")]
        nearest = nearest_name(str(file), neighbours) if neighbours else None
        hint = f"the nearest Python file is {nearest!r}" if nearest else f"{file.parent} holds no Python file"
        raise ConfigError(f"no reward file at {path} (custom_reward_function.path): {hint}")
    spec = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} (custom_reward_function.path) is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles in the file look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ConfigError(
            f"{path} (custom_reward_function.path) fails to run: {type(error).__name__}: {error}"
        ) from error
    return module


def _quote(value: object) -> str:
    """`repr(value)`, its middle cut out if it is long."""
    quote = reprlib.Repr()
    quote.maxstring = quote.maxother = LONGEST_QUOTE
    return quote.repr(value)
