"""engine.keeper."""
