"""Names of other projects over hetero's engine: code written for them changes its imports only."""
