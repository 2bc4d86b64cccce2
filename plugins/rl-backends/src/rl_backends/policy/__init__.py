"""What every policy backend shares: steps, rows, losses, checkpoints, ranks and refits."""
