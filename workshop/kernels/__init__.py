"""V3's kernels: their benchmark, what the compiler makes of them, and the search for tiles."""
