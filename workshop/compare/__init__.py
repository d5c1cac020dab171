"""Comparisons: sessions of runs, their rows, waterfalls, sweeps, regressions."""
