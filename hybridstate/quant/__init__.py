"""Storage formats of the live state, the risk of each key channel, and the requantised recurrence."""
