"""Keys of `rollout.multi_turn`: multi-turn episodes with an environment, tools or an agent. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, Count, FilePath, NotNegative, OneOf, Positive, Size, UnitInterval

TRUNCATE_SIDES = ("left", "middle", "right")


@dataclass
class EnvironmentConfig:
    """The environment: a class of the user's that answers turns."""

    path: FilePath | None = None
    """Python file with the environment class: reset(row), and step(turn) -> (observation, reward, done). adapter:NAME
    is an adapter of the package."""
    name: str = "Environment"
    """Name of the environment class in environment.path."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment class; an instance is created for every episode."""


@dataclass
class AgentConfig:
    """The agent: a program of the user's that calls the policy through an OpenAI-compatible endpoint."""

    path: FilePath | None = None
    """Python file with the agent: a function of (task, endpoint), async or not, which returns its reward or None.
    adapter:NAME is an adapter of the package."""
    name: str = "run"
    """Name of the agent function in agent.path."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the agent function."""
    command: list[str] | None = None
    """In place of an agent function: a command and its arguments, one process per running episode. It reads its task as
    JSON from standard input; OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set."""
    max_open: Annotated[int | None, Ge(1)] = None
    """Largest number of agents at once in each of num_workers processes, with their programs and sessions; an episode
    beyond it has failed. null: no limit."""
    max_request_bytes: Annotated[int | None, Ge(1)] = None
    """Largest request of an agent in bytes. null: 1 MiB and 1 KiB per token of data.max_prompt_length and
    data.max_response_length, at most 64 MiB; with images 64 MiB."""
    idle_timeout_s: Positive = 3630.0
    """Seconds after which the endpoint closes a connection that sends nothing, and refuses a request that does not
    end."""

    @property
    def is_set(self) -> bool:
        """Whether an agent is set."""
        return self.path is not None or self.command is not None


@dataclass
class MultiTurnConfig:
    """Episodes of several turns. data.max_response_length bounds all tokens after the prompt, observations too."""

    enable: bool = False
    """Multi-turn episodes: the environment, tools or agent answer each turn that ends by itself, until they are done or
    no tokens are left for another turn."""
    environment: Annotated[EnvironmentConfig, OURS] = field(default_factory=EnvironmentConfig)
    agent: Annotated[AgentConfig, OURS] = field(default_factory=AgentConfig)
    python: Annotated[FilePath | None, OURS] = None
    """Interpreter that runs environment.path or agent.path, in processes of its own: one with packages that the run
    does not have; null: the run's."""
    function_tool_path: FilePath | None = None
    """Python file with tools, in place of an environment: functions marked with @tool. A turn without a tool call is
    the last one; the reward function or reward models score it."""
    tool_config_path: FilePath | None = None
    """YAML file with tools, in place of an environment: classes with create, execute and release, as in verl."""
    tool_rewards: Annotated[bool, OURS] = False
    """Add the rewards that tools return to the score; false: only log them, as environment/tool_reward/mean."""
    format: str = "hermes"
    """Format of the model's tool calls: a name of vLLM's tool parsers."""
    max_parallel_calls: Size = 1
    """Largest number of tool calls in one turn; further calls get an error text as their result."""
    max_assistant_turns: Annotated[int | None, Ge(1)] = None
    """Largest number of turns of the policy in an episode; null: as many as the token limit allows."""
    max_tool_response_length: Size = 256
    """Largest number of characters of one message of an observation or tool result; a longer one is cut."""
    tool_response_truncate_side: Annotated[str, OneOf(TRUNCATE_SIDES)] = "middle"
    """Part of a too long tool result that is kept. left: its start | middle: both ends | right: its end."""
    tool_timeout_s: Annotated[Positive, OURS] = 60.0
    """Seconds that an environment or tool may take for one turn, and an agent between two requests; then its process is
    killed and the episode has failed."""
    planned_wait_s: Annotated[NotNegative, OURS] = 0.0
    """Only for plans: seconds that an episode waits for its environment or tools, over all turns."""
    num_workers: Annotated[Size, OURS] = 4
    """Worker processes for environments and tools, in addition to the ranks."""
    max_retries: Annotated[Count, OURS] = 0
    """Number of times that a failed episode is started again from its prompt, with other seeds."""
    max_failed_ratio: Annotated[UnitInterval, OURS] = 0.5
    """Largest share of a step's episodes that may fail; above it the run ends (exit code 4). A failed episode is
    neither trained nor compared with the others of its group."""

    @property
    def tools_file(self) -> tuple[str, str] | None:
        """(key, path) of the file with tools; None without tools."""
        files = {"function_tool_path": self.function_tool_path, "tool_config_path": self.tool_config_path}
        return next(((key, path) for key, path in files.items() if path is not None), None)

    @property
    def rewards(self) -> bool:
        """Whether an environment or an agent gives rewards."""
        return self.enable and (self.environment.path is not None or self.agent.is_set or self.tool_rewards)
