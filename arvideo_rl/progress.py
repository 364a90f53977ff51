"""How things are shown: bars on a terminal only, since a log should not fill up with them; tables wide in a log."""

from rich.console import Console

WIDTH = 120  # of a table written to a file or pipe, where rich would assume 80 and wrap every cell


def console() -> Console:
    """A console as wide as the terminal, or WIDTH where there is none."""
    return Console() if Console().is_terminal else Console(width=WIDTH)


def hidden() -> bool:
    """Whether bars should be left out."""
    return not Console().is_terminal
