"""The verifier of evidence bundles: the standard library and ``cryptography`` only, nothing of Podium.

`merkle`, `note` and `checkpoint` are the formats of the log, which the engine writes with the same functions.
"""
