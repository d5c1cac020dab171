"""The page over all results: from data to figures to blocks, on a server or in a file."""
