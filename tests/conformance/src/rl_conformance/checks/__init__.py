"""The checks, chapter by chapter: one function, one behaviour."""
