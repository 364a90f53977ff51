"""Progress bars appear on a terminal only: a log file should not fill up with them."""

from rich.console import Console


def hidden() -> bool:
    """Whether bars should be left out."""
    return not Console().is_terminal
