"""Trials: runs of `megatron-rl train` as child processes, watched, ended, judged, recorded: nightlies and ablations."""
