"""The report of a folder of results: a page, Markdown, and a form to fill in."""
