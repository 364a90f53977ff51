"""Geometric rewards: does the clip look like one solid scene seen by a moving camera?

Conventions, everywhere in this folder: OpenCV camera axes (x right, y down, z forward), ``x_cam = R x_world + t`` with
``w2c`` [F, 4, 4]; pixel coordinates (u, v) = (column, row) with pixel centres at half-integers; ``intrinsics`` [3, 3]
in pixels, one for the whole clip; depth is along z, in the units of the poses, NaN where unknown. Errors of position
are given as shares of the image diagonal. Shape letters: B clips, F frames, N points, H W pixels.
"""
