"""Rewards on another process or machine: ``client`` is a reward like any other, ``server`` gives it what it asks for,
``wire`` is what goes between them (npz there, JSON back, never pickle)."""
