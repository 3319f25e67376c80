"""Part 4, ten minutes: `megatron-rl sft --local` on one GPU: the loss falls, save, resume, tokens a second; variants.

python scripts/gpu_day/part4_sft.py [--device cpu --small] [--out outputs/gpu_day]
"""

import sys

from day import STEPS, part

LIMIT_S = 300

if __name__ == "__main__":
    runs = {name: STEPS / f"{name}.py" for name in ("sft", "sft_variants")}
    sys.exit(part("part4_sft", runs, LIMIT_S, __doc__))
