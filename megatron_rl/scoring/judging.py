"""Ask judges about responses: questions, attempts, verdicts, scores. Who generates is an `Asker`'s affair."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.judge_keys import GROUP, PAIRWISE
from megatron_rl.config.reward_keys import ScoringModelConfig, scoring_key
from megatron_rl.records import Batch, Sampling
from megatron_rl.rollout.slices import Drawn, Start
from megatron_rl.scoring.ended_cases import EndedCases
from megatron_rl.scoring.judge_forms import Ask, JudgedResponse, asks_of, judged_response, scores_of
from megatron_rl.scoring.judge_prompts import JudgePrompts, Question
from megatron_rl.scoring.judge_record import JudgeRecord, Written, key_of
from megatron_rl.scoring.judge_verdicts import VerdictReader
from megatron_rl.scoring.rule import Ended, read_samples, sample_of
from megatron_rl.scoring.scored_answers import ModelScores

Replies = dict[int, Drawn]
"""Number of a question -> the whole reply to it."""
SeedOf = Callable[[int, int], int]
LONGEST_NOTE = 2000
"""Characters of the verdicts on a response that tables show."""
WARMTH = 1.0
"""Temperature of a further attempt of a greedy judge."""


class Asker(Protocol):
    """A model that replies to questions."""

    def start(self, questions: Sequence[Start]) -> Callable[[], Replies]:
        """Begin, as far as that needs no other call to end first; the result waits for the replies."""


class EarlyAsker(Asker, Protocol):
    """An asker that may be given questions before their replies are wanted."""

    def begin(self, questions: Sequence[Start]) -> None:
        """Begin as far as that waits for nothing."""


@dataclass
class Opinion:
    """The attempts at one question. verdict: None: no attempt has one."""

    text: str = ""
    verdict: list[float] | None = None
    attempts: int = 0


class Judging:
    """One judge as the controller asks it.

    name: that of the reward model. policy: the tokenizer of the responses. own: the judge's tokenizer. asker: set
    before the first call, unless all is recorded. early: the asker, if it works while responses are generated.
    is_asked_in_replays: whether a replay does not take its replies from the record. seed_of: (digest of a question,
    attempt) -> seed of the reply.
    """

    def __init__(
        self,
        name: str,
        settings: ScoringModelConfig,
        policy: PreTrainedTokenizerBase,
        own: PreTrainedTokenizerBase,
        record: JudgeRecord,
        seed_of: SeedOf,
    ) -> None:
        """Raises ConfigError as `JudgePrompts`."""
        self.name = name
        self.settings = settings
        self.asker: Asker | None = None
        self.early: EarlyAsker | None = None
        self.is_asked_in_replays = False
        self._keys, self._policy, self._own, self._record = self.settings.judge, policy, own, record
        key = f"{scoring_key(name)}.judge"
        assert self._keys.prompt is not None  # it is a judge
        self._prompts = JudgePrompts(key, self._keys.prompt, self._own, self._keys.max_prompt_length)
        self._read = VerdictReader(self._keys)
        self._ended = EndedCases(self._keys.form)
        self._seed_of_digest = seed_of

    @property
    def is_recorded(self) -> bool:
        """Whether its verdicts are repeated, and it is not asked."""
        return self._keys.recorded or (self._record.is_replay and not self.is_asked_in_replays)

    def begin(self, answer: Ended) -> None:
        """Note a response that has ended before its batch is complete, in any thread; `proceed` asks about it."""
        if self.early is not None and not self.is_recorded and self.settings.scores_source(answer.row["data_source"]):
            self._ended.add(answer)

    def proceed(self) -> None:
        """Ask about the responses that have begun, as far as their form needs no others."""
        if self.early is not None:
            asks = asks_of(self._keys.form, self._ended.take(partial(sample_of, self._policy)))
            questions = self._prompts.fill([ask.places for ask in asks])
            self.early.begin(self._starts(dict.fromkeys(question.token_ids for question in questions), 0))

    def start(self, rows: Batch, chosen: torch.Tensor | None) -> Callable[[], ModelScores]:
        """Ask about responses; the result waits for the judge. chosen: see `ModelScores.rows`.

        Raises RewardError for a row without a rubric, where the form needs one, and for a question that a repeated
        record does not have.
        """
        cases = self._cases(rows)
        asks = asks_of(self._keys.form, cases)
        questions = self._prompts.fill([ask.places for ask in asks])
        judged = [len(ask.rows) if self._keys.form == GROUP else 1 for ask in asks]
        sizes = {question.token_ids: size for question, size in zip(questions, judged, strict=True)}
        wait = self._attempt(list(sizes), 0)

        def finish() -> ModelScores:
            return self._scores(asks, questions, self._replies(wait(), sizes), len(cases), chosen)

        return finish

    def _cases(self, rows: Batch) -> list[JudgedResponse]:
        samples = read_samples(rows, self._policy)
        prompts = rows.objects("raw_prompt")
        cases = zip(prompts, samples, rows["uid"].tolist(), strict=True)
        return [judged_response(prompt, sample, group) for prompt, sample, group in cases]

    def _replies(
        self, first: Mapping[tuple[int, ...], str], sizes: Mapping[tuple[int, ...], int]
    ) -> dict[tuple[int, ...], Opinion]:
        """Read the verdicts of the first attempt's texts, and ask again for missing ones. sizes: responses that a
        verdict is on, of each question.
        """
        replies = {question: Opinion() for question in first}
        texts, attempt = first, 0
        while True:
            for question, text in texts.items():
                replies[question] = Opinion(text, self._read(text, sizes[question]), attempt)
            open_ = [question for question, reply in replies.items() if reply.verdict is None]
            if not open_ or attempt == self._keys.retries:
                return replies
            attempt += 1
            texts = self._attempt(open_, attempt)()

    def _attempt(self, questions: Sequence[tuple[int, ...]], attempt: int) -> Callable[[], dict[tuple[int, ...], str]]:
        """Ask questions, or take their replies from the record that is repeated; the result waits for the texts."""
        starts, judge = self._starts(questions, attempt), self.name
        names = [key_of(judge, start.token_ids, start.sampling, start.seed) for start in starts]
        known = [self._record.take(judge, name) for name in names] if self.is_recorded else None
        assert known is not None or self.asker is not None  # the run has given one
        asked = None if known is not None or self.asker is None else self.asker.start(starts)

        def wait() -> dict[tuple[int, ...], str]:
            written = known or []
            if asked is not None:
                drawn = asked()
                written = [Written(drawn[place].token_ids, drawn[place].log_probs) for place in range(len(starts))]
            texts = [self._own.decode(list(reply.token_ids), skip_special_tokens=True) for reply in written]
            for name, reply, text in zip(names, written, texts, strict=True):
                self._record.add(judge, name, reply, text)
            return dict(zip(questions, texts, strict=True))

        return wait

    def _starts(self, questions: Iterable[tuple[int, ...]], attempt: int) -> list[Start]:
        keys = self._keys
        warm = WARMTH if attempt and not keys.temperature else keys.temperature
        sampling = Sampling(warm, keys.top_p, keys.top_k, keys.max_response_length, salt=0)
        return [
            Start(number, ids, self._seed_of(ids, attempt), keys.max_response_length, sampling)
            for number, ids in enumerate(questions)
        ]

    def _seed_of(self, ids: tuple[int, ...], attempt: int) -> int:
        """Seed of a question, which depends on its tokens and not on when it is asked."""
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=4).digest()
        return self._seed_of_digest(int.from_bytes(digest, "big"), attempt)

    def _scores(
        self,
        asks: Sequence[Ask],
        questions: Sequence[Question],
        replies: Mapping[tuple[int, ...], Opinion],
        num_rows: int,
        chosen: torch.Tensor | None,
    ) -> ModelScores:
        notes: list[list[str]] = [[] for _ in range(num_rows)]
        counts = torch.zeros(3, num_rows)  # by response: further attempts, questions without a verdict, cut ones
        failed = 0.5 if self._keys.form == PAIRWISE else self._keys.failed_score
        verdicts = []
        for ask, question in zip(asks, questions, strict=True):
            reply = replies[question.token_ids]
            verdicts.append([failed] * len(ask.rows) if reply.verdict is None else reply.verdict)
            for row in ask.rows:
                notes[row].append(f"{ask.label}: {reply.text}" if ask.label else reply.text)
                counts[:, row] += torch.tensor([reply.attempts, reply.verdict is None, question.is_cut])
        scores = scores_of(self._keys.form, asks, verdicts, num_rows)
        texts = ["\n".join(note)[:LONGEST_NOTE] for note in notes]
        further = {"retries": counts[0].tolist(), "unparsed": counts[1].tolist(), "cut": counts[2].tolist()}
        return ModelScores(
            self.name, scores, self.settings.weight, rows=chosen, texts={"verdict": texts}, counts=further
        )
