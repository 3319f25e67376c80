"""The guessing demo as an agent that knows nothing of training: it speaks to its policy by OpenAI's client.

    megatron-rl train --config configs/agents/guess.yaml actor_rollout_ref.rollout.multi_turn.environment.path=null \
        actor_rollout_ref.rollout.multi_turn.agent.path=scripts/demo_agent.py
"""

from __future__ import annotations

import re

from openai import AsyncOpenAI

NUM_GUESSES = 5
CLIENTS: dict[str, AsyncOpenAI] = {}
"""By URL: to make one takes longer than an episode of this demo."""


async def run(task: dict, endpoint) -> float:
    """Have a number from 0 to 15 guessed; returns 1.0 for the number within five guesses."""
    if endpoint.base_url not in CLIENTS:
        CLIENTS[endpoint.base_url] = AsyncOpenAI(base_url=endpoint.base_url, api_key="each episode has its own")
    create = CLIENTS[endpoint.base_url].with_options(api_key=endpoint.api_key).chat.completions.create
    messages, number = list(task["prompt"]), int(task["ground_truth"])
    for _ in range(NUM_GUESSES):
        answer = await create(model="policy", messages=messages)
        guess = answer.choices[0].message
        if re.fullmatch("[0-9]|1[0-5]", guess.content or "") is None:
            return 0.0
        if int(guess.content) == number:
            return 1.0
        messages += [guess, {"role": "user", "content": ">" if int(guess.content) < number else "<"}]
    return 0.0
