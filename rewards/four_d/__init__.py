"""The 4D reward: does the clip show one world in which things move as things do? After Stream4D (arXiv 2608.19556).

terms.py holds the formulas as tensor functions, observe.py measures a clip with them, calibration.py holds the
constants that turn the measurements into values, reward.py is the reward. Conventions are those of rewards/geometry.

Shape letters: F frames, S steps between the frames that are compared, W windows of steps, H W pixels, C components of
a velocity (2 in the image, 3 in space).
"""
