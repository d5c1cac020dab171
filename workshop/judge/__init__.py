"""The judge, and the process that it judges: see docs/trust.md."""
