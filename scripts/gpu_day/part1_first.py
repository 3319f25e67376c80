"""Part 1, eight minutes: the steps of `gpu_check` without vLLM, the context's size, the cost of a communicator, links.

python scripts/gpu_day/part1_first.py [--device cpu --small] [--out outputs/gpu_day]
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 60
FIRST = ("logits", "updates", "rounds", "checkpoint", "billion", "streams", "held_memory", "context_blocks")

if __name__ == "__main__":
    sys.exit(part("part1_first", of_gpu_check("topology", "context", *FIRST), LIMIT_S, __doc__))
