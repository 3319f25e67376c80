"""verl's keys and values that are others here: tables, and the notes that they give."""
