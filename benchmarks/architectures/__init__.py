"""Which architectures an engine can be refit with: one tiny model of each, tried for real."""
