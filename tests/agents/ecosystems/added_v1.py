"""Sums with a tool, as a taskset of verifiers 0.4; run as a program it serves the tool."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    """One tool."""

    @vf.tool
    async def add(self, terms: str) -> str:
        """Add numbers that are joined by +.

        Args:
            terms: the numbers, as 1+2
        """
        return str(sum(map(int, terms.split("+"))))


class SumData(vf.TaskData):
    """The sum."""

    answer: str


class Sum(vf.Task[SumData]):
    """Rewarded where the last reply has the sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Sums(vf.Taskset[Sum]):
    """Thirty-two sums."""

    def load(self):
        for number in range(32):
            yield Sum(SumData(prompt=f"{number:04d}+0003=", answer=str(number + 3)), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Adder.run()
