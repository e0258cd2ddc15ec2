"""What it costs: updates, decoding and restoring, each behind a correctness check."""
