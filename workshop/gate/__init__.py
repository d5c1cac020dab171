"""The gate before the clock, the audit after it, and the plausibility check."""
