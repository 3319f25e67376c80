"""The nightly gate: a run, a preemption, a comparison with golden metrics, one exit code, one page."""
