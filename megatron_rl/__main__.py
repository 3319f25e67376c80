"""`python -m megatron_rl` is the command `megatron-rl`: it heeds signals before it imports anything large."""

from megatron_rl.cluster.signals import quit_on_signals


def main() -> None:
    """Import the command line, and run it."""
    quit_on_signals()
    from megatron_rl.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
