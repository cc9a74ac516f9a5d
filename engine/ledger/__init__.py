"""engine.ledger."""
