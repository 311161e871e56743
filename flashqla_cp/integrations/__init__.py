"""One file per framework; each imports its framework inside functions only."""
