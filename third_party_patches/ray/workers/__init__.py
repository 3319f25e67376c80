"""Files that Ray runs in the place of its own."""
