"""What can be said about a run before it starts: which rules it breaks, and what its layout and batches are."""
