"""Retention horizons: from the weights (`static`), and as observed on real text (`observed`)."""
