"""Episodes: tokens that are only appended to, limits, failures, rows, and what a checkpoint keeps of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.agents.as_json import answer_from_json
from megatron_rl.agents.environment_source import ClassSource, EnvironmentsHere
from megatron_rl.agents.episode import (
    Episode,
    EpisodeLimits,
    Reply,
    episode_metrics,
    num_turns,
    rows_of,
    turn_room,
)
from megatron_rl.agents.episodes import LiveEpisodes, RecordedEpisodes
from megatron_rl.agents.observation import (
    EpisodeFailure,
    InitialConversation,
    Observation,
    TextLimit,
    ToolCall,
    Turn,
    TurnOptions,
)
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.errors import ReplayError
from megatron_rl.records import Sampling, row_lengths
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.slices import Drawn
from megatron_rl.sampling.journal import EpisodeBegan, TurnAnswered, from_json, reply_event, to_json

SAMPLING = Sampling(1.0, 1.0, -1, 8, salt=1)
OPENING = InitialConversation(({"role": "user", "content": "?"},), ({"type": "function"},))
HIGHER_THAN = Observation(({"role": "user", "content": "="},))
HIGHER = Observation(({"role": "user", "content": "higher"},), 0.5, counts={"tries": 1.0})


def episode(*turns: tuple[tuple[int, ...], Reply | None], max_turns: int = 5, max_tokens: int = 8) -> Episode:
    new = Episode((1, 2), {"index": 0, "sample": 0}, Sampling(1.0, 1.0, -1, max_tokens, salt=1))
    for drawn, reply in turns:
        new.extend(Drawn(drawn, tuple(-0.5 for _ in drawn), "stop"), version=3, has_turns=True)
        if reply is not None:
            new.take(reply, EpisodeLimits(max_turns))
    return new


def test_tokens_of_turns_and_observations_are_one_row():
    """By hand: two turns with an observation between them, then done. Would not catch other column orders."""
    ended = episode(((5, 6), Reply(Turn("a"), HIGHER, (7, 8))), ((9,), Reply(Turn("b"), Observation((), 1.0, True))))
    assert (ended.token_ids, ended.finish, ended.reward) == ([5, 6, 7, 8, 9], "stop", 1.5)
    rows = rows_of([ended], with_versions=True, has_turns=True)
    assert rows["input_ids"].unbind()[0].tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert rows["sampled"].unbind()[0].tolist() == [False, False, True, True, False, False, True]
    assert rows["rollout_log_probs"].unbind()[0].tolist() == [-0.5] * 3
    assert rows["versions"].unbind()[0].tolist() == [3] * 3
    assert (rows["environment_rewards"].tolist(), rows["failed"].tolist()) == ([1.5], [False])
    assert rows["truncated"].tolist() == [False] and rows["turn_rewards"].unbind()[0].tolist() == [0.0, 0.5, 1.0]


def test_a_turn_begins_behind_the_last_observation():
    """Before, between and after. Would not catch an observation of no tokens, behind which a turn goes on."""
    waiting = episode(((5, 6), Reply(Turn("a"), HIGHER, (7, 8))), ((9, 4), None))
    assert waiting.waits and waiting.turn_ids == [9, 4] and waiting.state == "away"
    assert episode(((5, 6), None)).turn_ids == [5, 6]


@pytest.mark.parametrize(
    ("reply", "limits", "finish", "num_tokens"),
    [
        (Reply(Turn("a"), HIGHER, (7, 8, 9, 9, 9)), {}, "", 7),  # one token may still follow
        (Reply(Turn("a"), HIGHER, (7, 8, 9, 9, 9, 9)), {}, "length", 2),
        (Reply(Turn("a"), HIGHER, (7,)), {"max_turns": 1}, "length", 2),
        (Reply(Turn("a"), Observation((), 0.0, True), ()), {"max_turns": 1}, "stop", 2),
        (Reply(Turn("a"), EpisodeFailure("raised", "why")), {}, "failed", 2),
    ],
)
def test_an_episode_ends_where_nothing_fits(reply, limits, finish, num_tokens):
    """Eight tokens after the prompt, two of them drawn. Would not catch a limit of the engine's context."""
    ended = episode(((5, 6), reply), **limits)
    assert (ended.finish, len(ended.token_ids), ended.waits) == (finish, num_tokens, False)


@pytest.mark.parametrize(
    ("finish", "limit", "replies", "turns"),
    [
        ("length", "away_cut", [Reply(Turn("a", num_tokens=8, is_cut=True), Observation((), 0.5, True))], 1),
        (
            "stop",
            "away_over",
            [
                Reply(Turn("a", num_tokens=8), HIGHER_THAN, (7,)),
                Reply(Turn("", is_cut=True), Observation((), 0.5, True)),
            ],
            1,
        ),
    ],
)
def test_an_episode_without_tokens_waits_for_its_grade(finish, limit, replies, turns):
    """By hand: the last token ends the turn by itself or not; a checkpoint keeps which, and the last turn has the
    grade. Would not catch an agent that is not told; test_agent_environment.py does.
    """
    over = Episode((1, 2), {}, SAMPLING)
    over.extend(Drawn(tuple(range(8)), (-0.5,) * 8, finish), 3, has_turns=True, hears_cut=True)
    for reply in replies:
        assert over.waits and over.finish == ""
        over.take(reply, EpisodeLimits(5), hears_cut=reply is replies[0])
        if over.waits:
            assert over.state == limit
            over.state = over.state
    assert (over.finish, over.reward, num_turns(over)) == ("length", 0.5, turns)
    assert over.turn_rewards.tolist() == [0.0] * 7 + [0.5] and rows_of([over], False, True)["truncated"].all()


def test_a_turn_has_the_tokens_that_an_agent_asks_for():
    """By hand: of eight, three in the first turn, which is answered, and no limit afterwards. Would not catch an engine
    that samples more.
    """
    path = Episode((1, 2), {}, SAMPLING, opening=InitialConversation(OPENING.messages, (), TurnOptions(3)))
    assert turn_room(path) == 3
    path.extend(Drawn((5, 6), (-0.5,) * 2, ""), 3, has_turns=True)
    assert turn_room(path) == 1 and not path.waits
    path.extend(Drawn((5,), (-0.5,), "length"), 3, has_turns=True, hears_cut=True)
    assert path.state == "away_limited"
    path.take(Reply(Turn("a", num_tokens=3, is_cut=True), HIGHER, (7,)), EpisodeLimits(5))
    assert (turn_room(path), path.waits, path.limit) == (4, False, "")


def test_a_turn_without_a_reader_is_context():
    """By hand: the second of three turns was cancelled; its tokens stay, and nothing counts or trains them. An episode
    in which nothing was read has failed. Would not catch a schedule without the mark; a run's replay has it.
    """
    left = Observation((), 0.25, False, {"agent_cancelled": 1.0}, OPENING, is_unread=True)
    ends = ((9,), Reply(Turn("c"), Observation((), 1.0, True)))
    ended = episode(((5, 6), Reply(Turn("a"), HIGHER, (7,))), ((8, 8), Reply(Turn("b"), left, (1,), True)), ends)
    rows = rows_of([ended], with_versions=True, has_turns=True)
    assert rows["input_ids"].unbind()[0].tolist() == [1, 2, 5, 6, 7, 8, 8, 1, 9]
    assert rows["sampled"].unbind()[0].tolist() == [False] * 2 + [True] * 2 + [False] * 4 + [True]
    assert rows["rollout_log_probs"].unbind()[0].tolist() == [-0.5] * 3 == [-0.5] * rows.num_sampled.item()
    assert rows["versions"].unbind()[0].tolist() == [3] * 3 and num_turns(ended) == 2 and ended.starts == [5]
    assert rows["turn_rewards"].unbind()[0].tolist() == [0.0, 0.5, 1.25] and ended.reward == 1.75
    assert answer_from_json(json.loads(json.dumps(dataclasses.asdict(left)))) == left
    unread = episode(((5, 6), Reply(Turn("a"), Observation((), 1.0, True, is_unread=True))))
    assert unread.finish == "failed" and "has read no turn" in unread.failure.reason


def test_of_a_failed_episode_nothing_is_trained():
    """Its row keeps the prompt alone, beside one that ended. Would not catch a group that counts it."""
    failed = episode(((5, 6), Reply(Turn("a"), EpisodeFailure("timed_out", "why"))))
    rows = rows_of([failed, episode(((5,), Reply(Turn("b"), Observation((), 1.0, True))))], False, True)
    assert rows.num_sampled.tolist() == [0, 1] and rows["failed"].tolist() == [True, False]
    assert rows["input_ids"].unbind()[0].tolist() == [1, 2]
    counted = Observation(HIGHER.messages, 0.5, counts={"tries": 1.0, "tool_reward": -0.5})
    metrics = episode_metrics([failed, episode(((5,), Reply(Turn("b"), counted, (7,))), ((3,), None))])
    assert metrics["environment/tool_reward/mean"] == -0.5
    assert metrics["episode/failed_ratio"] == 0.5 and metrics["episode/timed_out"] == 1.0
    assert metrics["num_turns/mean"] == 1 and metrics["environment/tries/mean"] == 1.0


def test_experts_of_an_episode_are_those_of_what_was_read_first():
    """By hand: slices of 3 and 1 read tokens, an observation, a conversation that begins again, and what follows is
    asked from there; of an episode that an older checkpoint began, whose first conversation has none, none are asked.
    Would not catch an engine that returns others.
    """

    def part(count: int) -> ColumnPiece:
        return ColumnPiece.whole(torch.full((count, 1, 1), count))

    path = Episode((1, 2), {}, dataclasses.replace(SAMPLING, max_tokens=20, with_experts=True))
    assert path.experts_from == 0
    path.extend(Drawn((5, 6), (-0.5, -0.5), "", part(3)), 3, has_turns=True)
    path.extend(Drawn((7,), (-0.5,), "stop", part(1)), 3, has_turns=True)
    assert path.experts_from == 4 == len(path.context_ids) - 1
    path.take(Reply(Turn("a"), HIGHER_THAN, (8, 9)), EpisodeLimits(9))
    path.extend(Drawn((4,), (-0.5,), "stop", part(3)), 3, has_turns=True)
    path.take(Reply(Turn("b"), HIGHER_THAN, (6, 6, 6), is_anew=True), EpisodeLimits(9))
    assert (path.context_ids, path.experts_from) == ((6, 6, 6), 0)
    path.extend(Drawn((4,), (-0.5,), "stop", part(3)), 3, has_turns=True)
    assert path.experts_from == 3
    failed = episode(((5, 6), Reply(Turn("a"), EpisodeFailure("timed_out", "why"))))
    failed.experts = [part(3)]
    rows = rows_of([failed, path], False, True)
    assert row_lengths(rows["routed_experts"]).tolist() == [0, 10]
    assert rows["routed_experts"].values().flatten().tolist() == [3] * 3 + [1] + [3] * 6
    path.experts = []
    assert path.experts_from is None and "routed_experts" not in rows_of([failed, path], False, True)
    path.forget()
    assert path.experts_from == 0


def test_a_failed_episode_is_drawn_again_as_often_as_may_be():
    """By hand: twice, each time with another seed and nothing of before; then it has failed. Would not catch an
    environment that was not made anew.
    """
    again, failed = episode(((5, 6), Reply(Turn("a"), HIGHER, (7,)))), Reply(Turn("b"), EpisodeFailure("crashed", "x"))
    for attempt in (1, 2, 2):
        again.extend(Drawn((9,), (-0.5,), "stop"), 3, has_turns=True)
        again.take(failed, EpisodeLimits(5, max_retries=2))
        assert again.attempt == attempt
        assert (again.finish == "failed") == bool(again.token_ids)
    assert again.failure is not None and episode_metrics([again])["episode/drawn_again"] == 2


def test_an_episode_begins_with_its_opening_or_fails():
    """By hand: the opening is its prompt, also after its tokens are dropped; without one it draws a token that counts
    for nothing. Would not catch a prompt that is too long for the engine.
    """
    begun, failed = episode(), episode()
    begun.begin(Reply(None, OPENING, (7, 8, 9)))
    begun.extend(Drawn((5,), (-0.5,), "stop"), 3, has_turns=True)
    begun.forget()
    assert (begun.prompt_ids, begun.opening, begun.room, begun.waits) == ((7, 8, 9), OPENING, 8, False)
    failed.begin(Reply(None, EpisodeFailure("raised", "why")))
    assert failed.room == 1 and failed.prompt_ids == (1, 2)
    failed.extend(Drawn((5,), (-0.5,), "length"), 3, has_turns=True)
    assert (failed.finish, failed.token_ids, failed.failure) == ("failed", [], EpisodeFailure("raised", "why"))


class Opens:
    """Environments that begin with a text of their row, or cannot."""

    opens, hears_cuts = True, False

    def play(self, number, job):
        said = job.row["said"]
        self.answers = [
            (
                number,
                InitialConversation(({"role": "user", "content": said},)) if said else EpisodeFailure("raised", "x"),
            )
        ]

    def take(self, waits):
        answers, self.answers = self.answers, []
        return answers


class Answers:
    """An environment that answers every turn with the next of these."""

    opens, hears_cuts = False, False

    def __init__(self, *answers):
        self.left, self.given = list(answers), []

    def play(self, number, job):
        self.given.append((number, self.left.pop(0)))

    def take(self, waits):
        given, self.given = self.given, []
        return given


@pytest.mark.parametrize("appends", [True, False])
def test_a_conversation_may_begin_anew(appends: bool):
    """By hand: an environment that begins another conversation, and a template that writes earlier turns otherwise, so
    that each turn begins with all that was said. Would not catch a template that shortens it wrongly.
    """
    tokenizer = AutoTokenizer.from_pretrained("assets/demo/model")
    eos = tokenizer.eos_token_id
    renderer, reader = TurnRenderer(tokenizer, [eos]), TurnReader(tokenizer)
    answers = Answers(
        HIGHER_THAN, Observation(anew=InitialConversation(({"role": "user", "content": "3="},))), HIGHER_THAN
    )
    live = LiveEpisodes(answers, renderer, reader, EpisodeLimits(9), appending=["user"] if appends else [])
    prompt = [{"role": "user", "content": "1+2="}]
    path = Episode(
        tuple(renderer.beginning(InitialConversation(tuple(prompt)))), {"prompt": prompt}, Sampling(1.0, 1.0, -1, 99, 1)
    )
    texts = []
    for said in "456":
        ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], eos]
        path.extend(Drawn(tuple(ids), (-0.5, -0.5), "stop"), 3, has_turns=True)
        live.submit(3, path)
        ((_, reply),) = live.take_of({3}, waits=True)
        event = from_json(to_json(reply_event(3, reply)))
        assert isinstance(event, TurnAnswered) and event.reply == reply
        path.take(reply, EpisodeLimits(9))
        texts.append(tokenizer.decode(list(path.context_ids)))
    if appends:
        assert texts == ["1+2=4<eos>=", "3=", "3=6<eos>="] and path.starts == [5]
    else:
        assert texts == ["1+2=4=", "3=", "3=6="] and path.starts == [2, 10, 14]
    rows = rows_of([path, episode(((5,), None))], with_versions=True, has_turns=True)
    assert rows["conversation_starts"].unbind()[1].sum() == 0
    marked = rows["conversation_starts"].unbind()[0].nonzero().flatten() - len(path.prompt_ids)
    assert marked.tolist() == path.starts and path.conversation.messages[0]["content"] == "3="
    path.forget()
    assert path.starts == [] and path.conversation == InitialConversation(tuple(prompt))


def no_parser(schemas):
    if schemas:
        raise TypeError("no schema")


@pytest.mark.parametrize("what", ["turn", "answer"])
def test_what_the_driver_cannot_read_costs_its_episode(what: str):
    """A parser that these tools cannot have, and a renderer that raises, beside an episode that goes on. Would not
    catch a format that no tools go with, which ends the run: it is the configuration's.
    """
    tokenizer = AutoTokenizer.from_pretrained("assets/demo/model")
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id], is_chat=False)
    live = LiveEpisodes(Answers(HIGHER, HIGHER), renderer, TurnReader(tokenizer, no_parser), EpisodeLimits(9))
    bad, good = episode(((5, 6), None)), episode(((5, 6), None))
    if what == "turn":
        bad.opening = OPENING
    else:
        live._environments.left[0] = Observation(({"role": "user", "content": 7},))
    live.submit(3, bad)
    live.submit(4, good)
    replies = {}
    while live.is_open:
        replies |= dict(live.take(waits=True))
    assert isinstance(replies[3].answer, EpisodeFailure) and "TypeError" in replies[3].answer.reason
    assert replies[4].answer == HIGHER
    bad.take(replies[3], EpisodeLimits(9))
    assert bad.finish == "failed" and from_json(to_json(reply_event(3, replies[3]))).reply == replies[3]


def test_a_conversation_that_is_too_long_cannot_begin():
    """Three tokens may be; a recorded beginning is taken as it was. Would not catch a limit of characters."""
    tokenizer = AutoTokenizer.from_pretrained("assets/demo/model")
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id])
    live = LiveEpisodes(Opens(), renderer, TurnReader(tokenizer), EpisodeLimits(5), longest_prompt=3)
    replies: list[tuple[int, Reply]] = []
    live.record = lambda number, reply: replies.append((number, reply))
    new = {number: Episode((1,), {"said": said}, SAMPLING) for number, said in enumerate(("1+2", "12+3", ""))}
    for number, each in new.items():
        live.begin({number: each})
    assert tokenizer.decode(list(new[0].prompt_ids)) == "1+2"
    assert (
        "has at least 4 tokens; data.max_prompt_length=3" in new[1].opening.reason and new[2].opening.cause == "raised"
    )
    again = {number: Episode((1,), each.row, SAMPLING) for number, each in new.items()}
    RecordedEpisodes(EpisodeLimits(5), replies).begin(again)
    assert [each.opening for each in again.values()] == [each.opening for each in new.values()]
    assert again[0].prompt_ids == new[0].prompt_ids
    for number, reply in replies:
        event = from_json(to_json(reply_event(number, reply)))
        assert isinstance(event, EpisodeBegan) and (event.request, event.reply) == (number, reply)


def test_a_line_of_the_schedule_holds_an_answer_to_the_last_bit():
    """Calls, counts, a failure. Would not catch floats of another precision: JSON has Python's."""
    turn = Turn("a", (ToolCall("add", {"x": 0.1}),))
    for answer in (
        Observation(({"role": "tool", "content": "\u2028"},), 1 / 3, False, {"n": 2.0}),
        EpisodeFailure("raised", "x"),
    ):
        event = reply_event(-3, Reply(turn, answer, (1, 2)))
        again = from_json(to_json(event))
        assert isinstance(again, TurnAnswered) and again.reply == event.reply and again.request == -3


def test_recorded_answers_come_in_their_order_and_no_others():
    """Two turns of one request, one of another. Would not catch a turn whose text differs: the engine compares it."""
    replies = [Reply(Turn(text), HIGHER, (number,)) for number, text in enumerate("abc")]
    recorded = RecordedEpisodes(EpisodeLimits(5), [(4, replies[0]), (7, replies[1]), (4, replies[2])])
    waiting = episode(((5,), None))
    recorded.submit(7, waiting)
    recorded.submit(4, waiting)
    assert recorded.take_of({4}, waits=True) == [(4, replies[0])]
    assert recorded.take() == [(7, replies[1])]
    recorded.submit(4, waiting)
    assert recorded.take() == [(4, replies[2])]
    with pytest.raises(ReplayError, match="request 4 ended that has no reply"):
        recorded.submit(4, waiting)


LONG = """
class Environment:
    def reset(self, row): pass
    def step(self, turn):
        return "0123456789", 0.0, False
"""


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "0123...(truncated)..."), ("right", "...(truncated)...6789"), ("middle", "01...(truncated)...89")],
)
def test_long_observations_are_cut(tmp_path: Path, side: str, text: str):
    """Ten characters where four may be; the next turn finds its environment as it was. Would not catch a cut in tokens,
    which nobody promises.
    """
    tokenizer, live = live_episodes(tmp_path, TextLimit(4, side))
    waiting = episode(((5, tokenizer.eos_token_id), None), max_tokens=100)
    for _ in range(2):
        live.submit(3, waiting)
        ((number, reply),) = live.take_of({3}, waits=True)
        assert number == 3 and tokenizer.decode(list(reply.token_ids)) == text
        waiting.take(reply, EpisodeLimits(5))
        waiting.extend(Drawn((5, tokenizer.eos_token_id), (-0.5, -0.5), "stop"), 3, has_turns=True)


@pytest.mark.parametrize("drawn", [(5, 6), ()])
def test_a_truncated_straggler_has_its_grade(tmp_path: Path, drawn: tuple[int, ...]):
    """In its second turn and before it. Would not catch one that the queue does not submit; test_request_queue.py
    does.
    """
    _, live = live_episodes(tmp_path, TextLimit(4), LONG + "    def cut(self, turn): return 0.25 + turn.num_tokens\n")
    late = episode(((5, 1), None), max_tokens=100)
    for _ in range(2):
        live.submit(3, late)
        ((_, reply),) = live.take_of({3}, waits=True)
        late.take(reply, EpisodeLimits(5))
        if not late.finish:
            late.extend(Drawn(drawn, (-0.5,) * len(drawn)), 3, has_turns=True)
            late.truncate(is_told=True)
    assert (late.finish, late.reward, num_turns(late)) == ("length", 0.25 + len(drawn), 1 + (len(drawn) > 0))


def live_episodes(folder: Path, limit: TextLimit, text: str = LONG) -> tuple[PreTrainedTokenizerBase, LiveEpisodes]:
    (folder / "env.py").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained("assets/demo/model")
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id], is_chat=False)
    host = ClassSource(str(folder / "env.py"), "Environment", "key", {}, limit).host()
    return tokenizer, LiveEpisodes(EnvironmentsHere(host), renderer, TurnReader(tokenizer), EpisodeLimits(5))


def test_answers_to_dropped_turns_are_not_taken(tmp_path: Path):
    """A turn is forgotten while it is open, and its request asks again. Would not catch a second drop."""
    _, live = live_episodes(tmp_path, TextLimit(100))
    live.submit(3, episode(((5, 6), None)))
    live.forget(3)
    live.submit(3, episode(((5, 9), None)))
    assert [number for number, _ in live.take()] == [3] and not live.is_open


def test_rows_of_single_turns_are_as_without_episodes():
    """No column of episodes, one turn, a suffix. Would not catch another order of columns."""
    single = Episode((1, 2), {}, SAMPLING)
    single.extend(Drawn((5, 6), (-1.0, -2.0), "length"), version=0, has_turns=False)
    rows = rows_of([single], with_versions=False, has_turns=False)
    assert set(rows.names) == {"input_ids", "sampled", "rollout_log_probs", "truncated"}
    assert torch.equal(rows["truncated"], torch.tensor([True]))
