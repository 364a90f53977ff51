"""One HTML file about one or several runs: read (data), say (status, differences), draw (series, charts), fill (page).

Nothing here imports torch, so that a report takes a second.
"""
