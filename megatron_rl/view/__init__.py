"""What a run did, to look at: a page in one file, and the life of one sample. No torch."""
