"""Every interleaving of small refits, faults and attacks, on the product's own code."""
