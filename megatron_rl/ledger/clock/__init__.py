"""The one model of time: tasks on lanes, and micro-batches in a pipeline. It knows no model and no hardware."""
