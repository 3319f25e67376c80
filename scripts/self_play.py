"""Two adapters of one `megatron-rl serve` learn Nim from each other, each from its turns, by the Tinker API's SDK.

    python scripts/self_play.py URL KEY RANK [ROUNDS] [SEED]    # in any environment with `pip install tinker`

Seven stones, a turn takes 1 to 3, and who takes the last one wins. A game is "7=2", then what is left, "5=1", ...
"""

import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import tinker
from tinker import types

BASE, DIGIT, EQUALS = "assets/demo/model", 4, 15
STONES, MOST = 7, 3
NUM_LESSONS, LESSON_SIZE, NUM_GAMES, NUM_EPOCHS, NUM_FINALS = 30, 128, 128, 4, 400
RULES = 0.2
"""Weight of random moves that the rules have: without them a player that always wins forgets the rest."""


@dataclass
class Game:
    """A game. mover: whose turn it is, 0 or 1. turns: (player, place of its token, log-prob, stones before)."""

    mover: int
    left: int = STONES
    tokens: list[int] = field(default_factory=lambda: [DIGIT + STONES, EQUALS])
    turns: list[tuple[int, int, float, int]] = field(default_factory=list)
    winner: int | None = None

    def take(self, token: int, log_prob: float) -> None:
        """Make a turn. Whose token is no move of the rules loses."""
        taken, other = token - DIGIT, 1 - self.mover
        self.turns.append((self.mover, len(self.tokens), log_prob, self.left))
        self.tokens.append(token)
        if not 1 <= taken <= min(MOST, self.left):
            self.winner = other
        elif taken == self.left:
            self.winner = self.mover
        else:
            self.left -= taken
            self.tokens += [DIGIT + self.left, EQUALS]
            self.mover = other


def play(players: Sequence, number: int, temperatures: tuple[float, float]) -> list[Game]:
    """Games of two samplers, each of which begins half of them. All games that go on make a turn at once."""
    params = [types.SamplingParams(max_tokens=1, temperature=one) for one in temperatures]
    games = [Game(place % 2) for place in range(number)]
    while any(game.winner is None for game in games):
        alike = defaultdict(list)
        for game in games:
            if game.winner is None:
                alike[game.mover, *game.tokens].append(game)
        futures = [
            players[mover].sample(types.ModelInput.from_ints(tokens), len(same), params[mover])
            for (mover, *tokens), same in alike.items()
        ]
        for same, future in zip(alike.values(), futures, strict=True):
            for game, drawn in zip(same, future.result().sequences, strict=True):
                game.take(drawn.tokens[0], drawn.logprobs[0])
    return games


def passed(client, loss: str, rows: list[tuple], scale: float = 1.0):
    """A pass whose loss is a mean over turns. rows: tokens, and columns as name -> place -> number, which is 0 in all
    other places.
    """
    num_turns, data = sum(len(columns[-1][1]) for _, *columns in rows), []
    for tokens, *columns in rows:
        aligned = {name: [column.get(place, 0.0) for place in range(1, len(tokens))] for name, column in columns}
        last = columns[-1][0]
        aligned[last] = [value * scale / num_turns for value in aligned[last]]
        inputs = {"target_tokens": tokens[1:]} | aligned
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return client.forward_backward(data, loss)


def stepped(client, learning_rate: float, *passes) -> None:
    """A step of Adam after passes."""
    adam = types.AdamParams(learning_rate=learning_rate, beta2=0.99, eps=1e-8, grad_clip_norm=1.0)
    for future in (client.optim_step(adam), *passes):
        future.result()


def lessons(draw: random.Random, number: int) -> list[tuple]:
    """Games of random moves that the rules have, with weight 1 for each."""
    games = [Game(0) for _ in range(number)]
    for game in games:
        while game.winner is None:
            game.take(DIGIT + draw.randint(1, min(MOST, game.left)), 0.0)
    return [(game.tokens, ("weights", {place: 1.0 for _, place, _, _ in game.turns})) for game in games]


def turns_of(player: int, games: list[Game]) -> list[tuple]:
    """A player's turns of all games. Advantages are over the mean of turns before as many stones."""
    ends, rows = defaultdict(list), []
    for game in games:
        for mover, _, _, left in game.turns:
            ends[mover, left].append(game.winner == player)
    mean = {key: sum(wins) / len(wins) for key, wins in ends.items()}
    for game in games:
        turns = [(place, log_prob, left) for mover, place, log_prob, left in game.turns if mover == player]
        advantages = {place: (game.winner == player) - mean[player, left] for place, _, left in turns}
        log_probs = {place: log_prob for place, log_prob, _ in turns}
        rows.append((game.tokens, ("logprobs", log_probs), ("advantages", advantages)))
    return rows


def main(url: str, key: str, rank: int, num_rounds: int = 20, seed: int = 1) -> None:
    """Teach one adapter the rules. Two that begin from it play each other and, half as often, the one of the start."""
    service, draw = tinker.ServiceClient(base_url=url, api_key=key), random.Random(seed)
    taught = service.create_lora_training_client(BASE, rank=rank, train_unembed=False).result()
    for _ in range(NUM_LESSONS):
        stepped(taught, 2e-3, passed(taught, "cross_entropy", lessons(draw, LESSON_SIZE)))
    path, start = taught.save_state("start").result().path, taught.save_weights_and_get_sampling_client().result()
    clients = [service.create_training_client_from_state(path).result() for _ in range(2)]
    for number in range(num_rounds + 1):
        players = [client.save_weights_and_get_sampling_client().result() for client in clients]
        if number in (0, num_rounds):
            finals = [play([player, start], NUM_FINALS, (0.0, 1.0)) for player in players]
            shares = " and ".join(f"{sum(game.winner == 0 for game in games) / NUM_FINALS:.3f}" for games in finals)
            print(f"round {number}: {shares} of games against the start are won", flush=True)
        if number < num_rounds:
            games = play(players, NUM_GAMES, (1.0, 1.0))
            pairs = [(players[0], start), (start, players[1])]  # whose errors show what to do in a lost position
            others = [play(pair, NUM_GAMES, (1.0, 1.0)) for pair in pairs]
            for player, client in enumerate(clients):
                rows = turns_of(player, games) + turns_of(player, others[player])
                for _ in range(NUM_EPOCHS):
                    rules = passed(client, "cross_entropy", lessons(draw, LESSON_SIZE // 2), RULES)
                    stepped(client, 1e-3, passed(client, "ppo", rows), rules)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
