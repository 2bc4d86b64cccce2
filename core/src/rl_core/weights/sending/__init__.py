"""The trainer's side of a refit."""
