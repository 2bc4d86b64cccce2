"""``rl new``: a small backend that keeps the contract, as the start of one's own."""
