"""engine.store."""
