"""Keys and values of verl that are others here: read from a table, said in lists."""
