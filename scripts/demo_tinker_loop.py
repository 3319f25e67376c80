"""A client's own loop over `megatron-rl serve`, by the Tinker API's SDK: GRPO's advantages on the demo's sums.

    python scripts/demo_tinker_loop.py URL KEY [STEPS] [SEED]

It needs `pip install tinker`, in any environment, and nothing of this repository.
"""

from __future__ import annotations

import random
import sys

import tinker
from tinker import types

BASE, END = "assets/demo/model", 1
NUM_PROMPTS, NUM_SAMPLES, NUM_EPOCHS, MINI_BATCH = 64, 8, 2, 256
ID = {char: 4 + place for place, char in enumerate("0123456789")} | {"+": 14, "=": 15}


def questions(draw: random.Random, number: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of random additions."""
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(number)]
    return [([ID[char] for char in f"{a:02}+{b:02}="], [*(ID[char] for char in f"{a + b:03}"), END]) for a, b in pairs]


def sampled(sampler, asked: list, number: int, temperature: float) -> list:
    """The sequences that continue each prompt."""
    params = types.SamplingParams(max_tokens=8, temperature=temperature)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), number, params) for prompt, _ in asked]
    return [future.result().sequences for future in futures]


def group_rows(prompt: list[int], answer: list[int], sequences: list) -> list[tuple]:
    """(tokens, log-probs, advantages) of each response, aligned to all tokens but the last; 0 in the prompt."""
    rewards = [float(one.tokens == answer) for one in sequences]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5 + 1e-6
    before, rows = [0.0] * (len(prompt) - 1), []
    for one, reward in zip(sequences, rewards, strict=True):
        advantages = before + [(reward - mean) / deviation] * len(one.tokens)
        rows.append((prompt + one.tokens, before + one.logprobs, advantages))
    return rows


def update(client, rows: list[tuple]) -> None:
    """One step of Adam. Losses are sums over tokens, so a mean is the client's to take."""
    num_tokens = sum(sum(map(bool, log_probs)) for _, log_probs, _ in rows)
    data = []
    for tokens, log_probs, advantages in rows:
        scaled = [advantage / num_tokens for advantage in advantages]
        inputs = {"target_tokens": tokens[1:], "logprobs": log_probs, "advantages": scaled}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    passed = client.forward_backward(data, "ppo")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-4, beta2=0.999, eps=1e-8, grad_clip_norm=1.0))
    passed.result(), stepped.result()


def share_right(sampler, asked: list) -> float:
    """The share of greedy responses that are right."""
    found = sampled(sampler, asked, 1, temperature=0.0)
    return sum(one.tokens == answer for (_, answer), (one,) in zip(asked, found, strict=True)) / len(asked)


def main(url: str, key: str, num_steps: int = 20, seed: int = 1) -> None:
    """Train all weights of the demo's model, and print the share of held-out sums that are right."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model=BASE, rank=0).result()  # 0: all weights
    draw, held_out = random.Random(seed), questions(random.Random(0), 200)
    for number in range(num_steps + 1):
        sampler = client.save_weights_and_get_sampling_client().result()  # these weights, for ever
        if number % 5 == 0:
            print(f"step {number}: {share_right(sampler, held_out):.3f} of held-out sums are right", flush=True)
        asked = questions(draw, NUM_PROMPTS)
        answers = sampled(sampler, asked, NUM_SAMPLES, temperature=1.0)
        rows = [row for one, found in zip(asked, answers, strict=True) for row in group_rows(*one, found)]
        for _ in range(NUM_EPOCHS if number < num_steps else 0):
            draw.shuffle(rows)
            for first in range(0, len(rows), MINI_BATCH):
                update(client, rows[first : first + MINI_BATCH])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
