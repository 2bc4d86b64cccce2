"""Generation by an SGLang server that is already running, and that somebody else started.

Nothing here imports SGLang; it need not be installed where this runs.
"""
