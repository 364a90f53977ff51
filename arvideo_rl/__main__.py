"""``python -m arvideo_rl`` is the same as ``arvideo``."""

from arvideo_rl.cli import main

if __name__ == "__main__":
    main()
