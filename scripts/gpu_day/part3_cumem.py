"""Part 3, eight minutes: memory that leaves and comes back under a captured graph, 50 rounds.

    python scripts/gpu_day/take_cumem.py WHEEL FOLDER        # where vLLM is not installed; then PYTHONPATH=FOLDER
    python scripts/gpu_day/part3_cumem.py [--device cpu --small] [--out outputs/gpu_day]

It needs a GPU: on a CPU it says so, and ends with code 77.
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 240

if __name__ == "__main__":
    sys.exit(part("part3_cumem", of_gpu_check("mapped_graphs"), LIMIT_S, __doc__))
