"""What it saves that samples share a prompt that is shorter than a block: tokens that an engine computes, CPU seconds.

    python scripts/bench/shared_prompts.py [--rounds 5] [--hidden 512] [--layers 8]

One rank with weights drawn at random draws 64 prompts of 11, then of 27 tokens with 8 answers of 8 tokens, with whole
blocks of 32 tokens and with prefix_match_unit=8 and 1. Each way has an engine in a process of its own, which lives for
all rounds; the ways take turns. Seconds of the rank are medians, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

UNITS, LENGTHS = (None, 8, 1), (11, 27)
PROMPTS, SAMPLES, TOKENS = 64, 8, 8
VOCABULARY = 64


def write_model(folder: Path, hidden: int, layers: int) -> None:
    """The config.json of a small Qwen2; vLLM draws its weights."""
    settings = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings))


def serve(folder: str, unit: int | None) -> None:
    """Build an engine; then, for every length on stdin, draw and print CPU seconds and computed tokens."""
    import torch

    from third_party_patches.vllm import cpu_partial_prompts, shared_partial_blocks

    shared_partial_blocks.PATCH.apply()
    cpu_partial_prompts.PATCH.apply()
    from vllm import LLM
    from vllm.distributed import parallel_state

    from megatron_rl.records import Sampling
    from megatron_rl.rollout.in_flight_requests import InFlightRequests
    from megatron_rl.rollout.replica_groups import ReplicaGroups
    from megatron_rl.rollout.slices import Slice, Start

    engine = LLM(
        model=folder,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=PROMPTS * SAMPLES,
        max_num_batched_tokens=32768,
        kv_cache_memory_bytes=1 << 28,
        async_scheduling=False,
        disable_log_stats=True,
        block_size=32,
        prefix_match_unit=unit,
    ).llm_engine
    torch.set_num_threads(1)
    scheduler, computed = engine.engine_core.engine_core.scheduler, list[int]()
    schedule = scheduler.schedule

    def counted(*args: object, **kwargs: object) -> object:
        output = schedule(*args, **kwargs)
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    alone = ReplicaGroups(parallel_state.get_dp_group().cpu_group)
    requests, sampling = InFlightRequests(engine, alone, [1]), Sampling(1.0, 1.0, -1, TOKENS, 0)
    print("ready", flush=True)
    for line in sys.stdin:
        rng = Random(0)
        rows = [tuple(rng.randrange(3, VOCABULARY) for _ in range(int(line))) for _ in range(PROMPTS)]
        numbered = enumerate(row for row in rows for _ in range(SAMPLES))
        starts = tuple(Start(number, row, number, TOKENS, sampling) for number, row in numbered)
        computed.clear()
        begun = time.process_time()
        requests.advance(Slice(0, None, starts))
        print(json.dumps([time.process_time() - begun, sum(computed)]), flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--unit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.unit)
        return
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    found: dict[tuple[int, int | None], list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.hidden, options.layers)
        engines = {}
        for unit in UNITS:
            command = [sys.executable, __file__, "--serve", folder, *([] if unit is None else ["--unit", str(unit)])]
            engines[unit] = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            while (line := engines[unit].stdout.readline()) != "ready\n":
                assert line, "the engine has not started"
        for number in range(options.rounds + 1):
            for length in LENGTHS:
                for unit in UNITS if number % 2 else UNITS[::-1]:
                    engines[unit].stdin.write(f"{length}\n")
                    engines[unit].stdin.flush()
                    drawn = json.loads(engines[unit].stdout.readline())
                    if number:  # the first warms up
                        found.setdefault((length, unit), []).append(tuple(drawn))
        for engine in engines.values():
            engine.stdin.close()
            engine.wait()
    for (length, unit), rounds in sorted(found.items(), key=lambda item: (item[0][0], UNITS.index(item[0][1]))):
        seconds, tokens = [seconds for seconds, _ in rounds], {tokens for _, tokens in rounds}
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"prompts of {length}, unit {unit or 'whole blocks'}: {tokens} tokens computed, {spread} CPU seconds")


if __name__ == "__main__":
    main()
