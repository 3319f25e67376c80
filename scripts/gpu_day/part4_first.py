"""Part 4, ten minutes: other steps of `gpu_check` without vLLM, the context's size, the cost of a communicator, links.

python scripts/gpu_day/part4_first.py [--device cpu --small | --rehearse] [--out outputs/gpu_day]
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 100
FIRST = ("context", "billion", "updates", "checkpoint", "held_memory", "topology")

if __name__ == "__main__":
    sys.exit(part("part4_first", of_gpu_check(*FIRST), LIMIT_S, __doc__))
