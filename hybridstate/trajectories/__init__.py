"""Running the real model offline: loading it, driving its recurrence, recording what it does."""
