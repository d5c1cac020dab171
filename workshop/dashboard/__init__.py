"""The page over all results: data, figures, blocks, layout; on a server or exported."""
