"""Results as tables, charts, pages and documents."""
