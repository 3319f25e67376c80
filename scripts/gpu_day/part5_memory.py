"""Part 5, six minutes: planned memory of every phase beside the measured one, and what lies outside of torch.

python scripts/gpu_day/part5_memory.py [--device cpu --small] [--out outputs/gpu_day]
"""

import sys

from day import STEPS, part

LIMIT_S = 360

if __name__ == "__main__":
    sys.exit(part("part5_memory", {"sft_memory": STEPS / "sft_memory.py"}, LIMIT_S, __doc__))
