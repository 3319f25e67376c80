"""Keys of `rollout.multi_turn`: episodes of several turns, with an environment between them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, Count, FilePath, NotNegative, OneOf, Positive, Size, UnitInterval

TRUNCATE_SIDES = ("left", "middle", "right")


@dataclass
class EnvironmentConfig:
    """The class of the user's that answers turns."""

    path: FilePath | None = None
    """Python file with the class that answers turns: reset(row), and step(turn) -> (observation, reward, done)."""
    name: str = "Environment"
    """Class in that file."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments with which it is made, once for every episode."""


@dataclass
class AgentConfig:
    """A program of the user's that is the agent. It speaks with the policy through an OpenAI-compatible endpoint."""

    path: FilePath | None = None
    """Python file with the agent: a function of (task, endpoint), async or not, which returns its reward or None."""
    name: str = "run"
    """Function in that file."""
    command: list[str] | None = None
    """In place of a function: a command and its arguments. Its task is JSON on standard input; OPENAI_BASE_URL and
    OPENAI_API_KEY are set, and those of ANTHROPIC. One process for each open episode."""

    @property
    def is_set(self) -> bool:
        """Whether there is an agent."""
        return self.path is not None or self.command is not None


@dataclass
class MultiTurnConfig:
    """Episodes of several turns. data.max_response_length bounds all tokens after the prompt, observations too."""

    enable: bool = False
    """Answer every turn that ends by itself, until the environment is done or there is no room for another turn."""
    environment: Annotated[EnvironmentConfig, OURS] = field(default_factory=EnvironmentConfig)
    agent: Annotated[AgentConfig, OURS] = field(default_factory=AgentConfig)
    function_tool_path: FilePath | None = None
    """Python file with tools, in place of an environment: functions marked with @tool. A turn without a call is the
    last one; its answer is judged by the rule or by reward models."""
    tool_config_path: FilePath | None = None
    """YAML file with tools, in place of an environment: classes with create, execute and release, as verl has them."""
    tool_rewards: Annotated[bool, OURS] = False
    """Add the rewards that tools return to the score; false: they are logged alone, as environment/tool_reward/mean."""
    format: str = "hermes"
    """How the model writes calls: a name of vLLM's tool parsers."""
    max_parallel_calls: Size = 1
    """Calls of one turn; further ones are refused with a text."""
    max_assistant_turns: Annotated[int | None, Ge(1)] = None
    """Turns of the policy in an episode at most; null: as many as there is room for."""
    max_tool_response_length: Size = 256
    """Characters of one message of an observation; what is more is cut out."""
    tool_response_truncate_side: Annotated[str, OneOf(TRUNCATE_SIDES)] = "middle"
    """Where the text of a longer one is cut: left: its start is kept | middle: both ends | right: its end."""
    tool_timeout_s: Annotated[Positive, OURS] = 60.0
    """Seconds that an environment may take for one turn, and an agent between two requests; then the episode has
    failed, and what took so long is killed."""
    planned_wait_s: Annotated[NotNegative, OURS] = 0.0
    """Seconds that an episode waits for answers in all its turns together, as plans count it; nothing measures it."""
    num_workers: Annotated[Size, OURS] = 4
    """Processes in which environments are, in addition to the ranks."""
    max_retries: Annotated[Count, OURS] = 0
    """How often an episode that has failed is drawn again from its prompt, with other seeds."""
    max_failed_ratio: Annotated[UnitInterval, OURS] = 0.5
    """Largest share of a step's episodes that may fail; beyond it the run ends (exit code 4). A failed episode is not
    trained, and is not compared with the others of its group."""

    @property
    def tools_file(self) -> tuple[str, str] | None:
        """(key, path) of the file with tools; None without tools."""
        files = {"function_tool_path": self.function_tool_path, "tool_config_path": self.tool_config_path}
        return next(((key, path) for key, path in files.items() if path is not None), None)

    @property
    def rewards(self) -> bool:
        """Whether an environment or an agent gives rewards."""
        return self.enable and (self.environment.path is not None or self.agent.is_set or self.tool_rewards)
