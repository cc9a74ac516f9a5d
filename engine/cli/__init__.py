"""The command line: a face of the engine. Must never hold a rule of its own about runs, plans or pools."""
