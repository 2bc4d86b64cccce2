"""What a refit carries: the tensors, the plan that cuts them into buckets, and their digests."""
