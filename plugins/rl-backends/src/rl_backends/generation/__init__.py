"""What every generation backend shares: calls, prompts, rows and sampling."""
