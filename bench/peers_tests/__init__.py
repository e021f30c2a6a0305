"""Other projects' own tests, run over hetero's adapters; see __main__."""
