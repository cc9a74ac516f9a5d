"""What people may ask of a run that exists: one module a kind of order. An order is a row first, then a wake-up."""
