"""The controller's side of a run: its parts, algorithm, lifecycle, logger, report, validation and folder."""
