"""The proof: the gate before the clock, the audit after it, and the physics."""
