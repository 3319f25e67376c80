"""What a run keeps on the controller: its parts, algorithm, lifecycle, logger, report, validation and folder."""
