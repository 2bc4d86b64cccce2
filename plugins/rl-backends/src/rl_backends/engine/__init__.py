"""How a refit writes to the model of an engine that has its own loader."""
