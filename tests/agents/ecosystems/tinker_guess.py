"""The guessing game as an environment of tinker-cookbook."""

from dataclasses import dataclass

from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult


class Guess(Env):
    """Five guesses of a number; ">" means that it is higher."""

    def __init__(self, number: int, renderer: object) -> None:
        self.number, self.renderer, self.left = number, renderer, 5
        self.turns = [{"role": "user", "content": "0-15?"}]

    def prompt(self):
        return self.renderer.build_generation_prompt(self.turns)

    async def initial_observation(self):
        return self.prompt(), self.renderer.get_stop_sequences()

    async def step(self, action, *, extra=None):
        message, _ = self.renderer.parse_response(action)
        text, self.left = message["content"], self.left - 1
        guess = int(text) if text.isdigit() else None
        is_done = guess in (None, self.number) or not self.left
        self.turns.append({"role": "assistant", "content": text})
        if not is_done:
            self.turns.append({"role": "user", "content": ">" if guess < self.number else "<"})
        reward = float(guess == self.number)
        return StepResult(reward, is_done, next_observation=self.prompt(), next_stop_condition=[])


@dataclass(frozen=True)
class Builder(EnvGroupBuilder):
    """Eight games with one number."""

    number: int
    renderer: object

    async def make_envs(self):
        return [Guess(self.number, self.renderer) for _ in range(8)]


def builder(row, renderer) -> Builder:
    return Builder(int(row["ground_truth"]), renderer)
