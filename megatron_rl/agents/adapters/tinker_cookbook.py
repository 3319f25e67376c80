"""An environment of tinker-cookbook (`adapter:tinker_cookbook`): an `Env` of an `EnvGroupBuilder`.

kwargs: file and function, a function of (row, renderer) of a Python file that returns a builder; others are keyword
arguments of the function. The renderer gives messages to the run, whose chat template renders them, so that no token is
rendered twice. Group rewards are refused: an episode is scored when it ends, before the others of its group exist.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import tinker
from tinker_cookbook.renderers.base import ParseTermination
from tinker_cookbook.rl.types import EnvGroupBuilder

GROUP_REWARDS = "compute_group_rewards scores several episodes; try: custom_reward_function.per_group of the run"


class TextRenderer:
    """A renderer whose tokens are the bytes of texts. messages: the last conversation that it was given."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.tokenizer = SimpleNamespace(
            decode=lambda ids, **_: bytes(ids).decode(errors="replace"), encode=lambda text, **_: list(text.encode())
        )

    def build_generation_prompt(self, messages: list[Any], *_: Any, **__: Any) -> tinker.ModelInput:
        """Keep a conversation; its tokens are not read."""
        self.messages = list(messages)
        return tinker.ModelInput.from_ints([])

    def parse_response(self, response: list[int]) -> tuple[Any, ParseTermination]:
        """Return a turn as a message."""
        return {"role": "assistant", "content": self.tokenizer.decode(response)}, ParseTermination.STOP_SEQUENCE

    def get_stop_sequences(self) -> list[str]:
        """Return none: a turn ends as the policy's turns end."""
        return []


class Environment:
    """One episode: the environment of the row's sample in its group."""

    @staticmethod
    def check(file: str, function: str = "builder", **kwargs: Any) -> None:
        """Raise ValueError where the file has no such function."""
        _function(file, function)

    def __init__(self, file: str, function: str = "builder", **kwargs: Any) -> None:
        self._function, self._kwargs, self._renderer = _function(file, function), kwargs, TextRenderer()

    async def reset(self, row: dict[str, Any]) -> None:
        """Make the group's environments, and begin with the sample's."""
        self._builder = self._function(row, self._renderer, **self._kwargs)
        if type(self._builder).compute_group_rewards is not EnvGroupBuilder.compute_group_rewards:
            raise ValueError(GROUP_REWARDS)
        made = await self._builder.make_envs()
        self._env = made[row.get("sample", 0) % len(made)]
        began = await self._env.initial_observation()
        if not isinstance(began, tuple):
            raise ValueError(f"the environment has no first observation: {began!r:.200}")
        self._seen = self._conversation()

    def opening(self) -> list[dict[str, str]]:
        """Return the first conversation."""
        return self._seen

    async def step(self, turn: Any) -> dict[str, Any]:
        """Take the policy's text as an action."""
        result = await self._env.step(list(turn.text.encode()), extra={"stop_reason": "stop"})
        counts = {name: float(value) for name, value in result.metrics.items()}
        reply = {"reward": float(result.reward), "is_done": bool(result.episode_done), "counts": counts}
        if result.episode_done:
            return reply
        before, self._seen = self._seen, self._conversation()
        if self._seen[: len(before)] == before:
            return {**reply, "messages": self._seen[len(before) + 1 :]}
        return {**reply, "anew": {"messages": self._seen}}

    async def close(self) -> None:
        """Let the builder end its environments."""
        await self._builder.cleanup()

    def _conversation(self) -> list[dict[str, str]]:
        return [{"role": message["role"], "content": _text(message["content"])} for message in self._renderer.messages]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def _function(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("builder_file", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"file={file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"file={file} must define the function {name}")
    return getattr(module, name)
