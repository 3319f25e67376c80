"""A project to begin with: files written from three responses, and a tiny model."""
