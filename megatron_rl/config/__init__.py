"""The configuration: schema, loading with dotted overrides, and the rules each value must keep. No torch."""
