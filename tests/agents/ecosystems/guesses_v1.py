"""The guessing game as a taskset and an environment of verifiers 0.4, which asks again after each turn."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class GuessData(vf.TaskData):
    """A number from 0 to 15."""

    answer: str


class Guess(vf.Task[GuessData]):
    """Rewarded where the last guess is the number."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Guesses(vf.Taskset[Guess]):
    """All numbers, four times."""

    def load(self):
        for number in range(64):
            yield Guess(GuessData(prompt="0-15?", answer=str(number % 16)), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """One role: the policy's."""

    agent: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Five turns."""

    async def run(self, task, agents):
        asked = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.agent.interaction(asked) as agent:
            said = "0-15?"
            for _ in range(5):
                reply = await agent.turn(said)
                guess = reply.last_reply.strip()
                if reply.terminated or guess == task.data.answer or not guess.isdigit():
                    break
                said = ">" if int(guess) < int(task.data.answer) else "<"
