"""An environment of verifiers 0.4 (`adapter:verifiers`, an agent): its taskset, harness and rubric play the episode,
with the policy behind the run's endpoint.

kwargs: env, as in a configuration of verifiers: {taskset: {id: ...}, id: ..., agent: {max_turns: 4}}. A role without a
harness has `null`, whose chat loop runs in this process; a role without a runtime has `subprocess`. Rows are those of
`megatron-rl dataset --from verifiers:TASKSET`. The reward is the sum over the traces that are trainable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import importlib.util
import itertools
import json
import os
import tempfile
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

SERVED: dict[str, asyncio.Task[Any]] = {}
"""Environments that serve, by their configuration."""
NUMBERS = itertools.count()
ARGUMENTS: contextvars.ContextVar[argparse.Namespace] = contextvars.ContextVar("arguments of a chat loop")


def check(env: dict[str, Any] | None = None) -> None:
    """Raise what verifiers raises for a configuration that cannot be."""
    _configured(env)


async def run(task: dict[str, Any], endpoint: Any, env: dict[str, Any] | None = None) -> float:
    """Play the episode of a row; returns its reward. Raises RuntimeError with the errors of one that is not ok."""
    served, tasks, _ = await asyncio.shield(_serving(env))
    extra = task["extra_info"] or {}
    index, key = extra.get("idx"), extra.get("key")
    if index not in tasks or tasks[index].key != key:
        raise ValueError(f"row {task['index']}: extra_info.idx={index} and key={key} name no task of the taskset")
    variable = f"POLICY_API_KEY_{next(NUMBERS)}"
    os.environ[variable] = endpoint.api_key
    try:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        episode = await served.run_episode(tasks[index], vf.ModelContext("policy", client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:1000])
    return float(sum(trace.reward or 0.0 for trace in episode.traces if trace.agent.trainable))


def rows(name: str, size: int, seed: int, **taskset: Any) -> list[dict[str, Any]]:
    """Return tasks of a taskset; seed: of their order, 0: as they are. taskset: its settings."""
    loaded = load_taskset(_configured({"taskset": {"id": name, **taskset}}).taskset)
    tasks = itertools.islice(loaded.shuffle(seed) if seed else loaded, size)
    return [
        {
            "prompt": task.data.prompt_text or name,
            "ground_truth": str(getattr(task.data, "answer", "")),
            "extra_info": {"idx": task.data.idx, "key": task.key},
        }
        for task in tasks
    ]


def _configured(env: dict[str, Any] | None) -> Any:
    given = env or {}
    taskset = given.get("taskset") or {}
    if not taskset.get("id"):
        raise ValueError("agent.kwargs must have env: {taskset: {id: ...}}")
    roles = agent_config_fields(resolve_env_config(given))
    for role in roles:
        own = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        given = {**given, role: {**own, **(given.get(role) or {})}}
    return resolve_env_config(given)


def _serving(env: dict[str, Any] | None) -> asyncio.Task[Any]:
    name = json.dumps(env, sort_keys=True)
    if name not in SERVED:
        SERVED[name] = asyncio.ensure_future(_begin(env))
    return SERVED[name]


async def _begin(env: dict[str, Any] | None) -> tuple[Any, dict[int, Any], Any]:
    served = load_environment(_configured(env))
    serving = served.serving()
    await serving.__aenter__()  # until this process ends
    return served, {task.data.idx: task for task in served.taskset}, serving


async def _launch(
    self: Any, ctx: Any, trace: Any, runtime: Any, url: str, secret: str, servers: Any, data: Any, **gate: str | None
) -> vf.ProgramResult:
    """Run the chat loop of the null harness here: its own way installs the loop's packages for each machine."""
    system, prompt = self.resolve_prompt(data)
    tools = {name: {"url": address, "timeout": self.config.tool_timeout} for name, address in servers.items()}
    given: dict[str, Any] = {
        "base_url": url,
        "api_key": secret,
        "model": ctx.model,
        "tool_interception_url": gate.get("tool_interception_url") or "",
    }
    given |= {"system_prompt": system or "", "mcp_config": json.dumps({"mcpServers": tools}) if tools else ""}
    given |= dict.fromkeys(("bash", "compaction", "edit", "search"), False) | {
        "serper_key": "",
        "summarize_at_tokens": None,
    }
    is_text = isinstance(prompt, str)
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as messages:
        json.dump([] if is_text else [message_to_wire(message) for message in prompt or ()], messages)
        messages.flush()
        given |= {"prompt": prompt if is_text else "", "initial_messages_file": "" if is_text else messages.name}
        ARGUMENTS.set(argparse.Namespace(**given))
        await LOOP.main()
    return vf.ProgramResult(0, "", "")


async def _nothing(self: Any, runtime: Any) -> None:
    """Prepare nothing."""


def _chat_loop() -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(CHAT_PROGRAM_SOURCE)
        file.flush()
        spec = importlib.util.spec_from_file_location("verifiers_chat_loop", file.name)
        loop = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(loop)  # type: ignore[union-attr]
    loop.parse_args = ARGUMENTS.get  # type: ignore[attr-defined]
    return loop


LOOP = _chat_loop()
NullHarness.setup, NullHarness.launch = _nothing, _launch
