"""What a run shows and records: metrics, timers, progress, tables and pictures."""
