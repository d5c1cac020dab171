"""The report: what a folder of results says, as a page, as Markdown, and as a form to fill in."""
