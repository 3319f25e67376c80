"""A project to begin with: files written from three answers, and a tiny model."""
