"""`python -m megatron_rl` is the command `megatron-rl`."""

from megatron_rl.cli import main

if __name__ == "__main__":
    main()
