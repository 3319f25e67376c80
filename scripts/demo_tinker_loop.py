"""A client's own loop over `megatron-rl serve`, by the Tinker API's SDK: GRPO's advantages on the demo's sums.

python scripts/demo_tinker_loop.py URL KEY [STEPS] [SEED]    # in any environment with `pip install tinker`
"""

import random
import statistics
import sys

import tinker
from tinker import types

NUM_PROMPTS, NUM_SAMPLES, NUM_UPDATES, MINI_BATCH, NUM_TOKENS = 64, 8, 4, 256, 4
ID = {char: 4 + place for place, char in enumerate("0123456789")} | {"+": 14, "=": 15}
ADAM = types.AdamParams(learning_rate=1e-4, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)


def questions(draw: random.Random, number: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of random additions."""
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(number)]
    return [([ID[char] for char in f"{a:02}+{b:02}="], [*(ID[char] for char in f"{a + b:03}"), 1]) for a, b in pairs]


def sampled(sampler: tinker.SamplingClient, asked: list, number: int, temperature: float) -> list:
    """Sequences that continue each prompt."""
    params = types.SamplingParams(max_tokens=8, temperature=temperature)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), number, params) for prompt, _ in asked]
    return [future.result().sequences for future in futures]


def datum(prompt: list[int], response: types.SampledSequence, advantage: float) -> types.Datum:
    """One response. Columns are aligned with all tokens but the first, and 0 in the prompt."""
    before, after = [0.0] * (len(prompt) - 1), [advantage] * len(response.tokens)
    inputs = {"logprobs": before + response.logprobs, "advantages": before + after}
    inputs["target_tokens"] = prompt[1:] + response.tokens
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + response.tokens[:-1]), loss_fn_inputs=inputs)


def main(url: str, key: str, num_steps: int = 20, seed: int = 1) -> None:
    """Train all weights of the demo's model, and print the share of held-out sums that are right."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client("assets/demo/model", rank=0).result()  # 0: all weights
    draw, held_out = random.Random(seed), questions(random.Random(0), 200)
    for number in range(num_steps + 1):
        sampler = client.save_weights_and_get_sampling_client().result()  # these weights, for ever
        if number % 5 == 0:
            is_right = [one.tokens == held_out[n][1] for n, (one,) in enumerate(sampled(sampler, held_out, 1, 0.0))]
            print(f"step {number}: {statistics.mean(is_right):.3f} of held-out sums are right", flush=True)
        data, asked = [], questions(draw, NUM_PROMPTS)
        for (prompt, answer), group in zip(asked, sampled(sampler, asked, NUM_SAMPLES, 1.0), strict=True):
            rewards = [float(one.tokens == answer) for one in group]
            mean, scale = statistics.mean(rewards), (statistics.pstdev(rewards) + 1e-6) * MINI_BATCH * NUM_TOKENS
            data += [datum(prompt, one, (r - mean) / scale) for one, r in zip(group, rewards, strict=True)]
        for _ in range(NUM_UPDATES if number < num_steps else 0):
            passed = client.forward_backward(draw.sample(data, MINI_BATCH), "ppo")  # a sum: the mean is in `scale`
            client.optim_step(ADAM).result(), passed.result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
