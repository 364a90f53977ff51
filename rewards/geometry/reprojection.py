"""Pointwise re-projection (VIGOR, arXiv 2603.16271) and leave-one-out re-rendering (after VideoGPA, 2601.23286)."""

from __future__ import annotations

import torch
from torch import Tensor

from rewards.geometry.cameras import NEAR, Geometry, diagonal, inside, lift, pixel_centres, project

SEEN = 0.05  # least confidence of a track


def salient_points(saliency: Tensor, known: Tensor, *, patch: int = 4, share: float = 0.2, most: int = 2048) -> Tensor:
    """Centres (u, v) [N, 2] of the patches worth checking: the ``share`` of all patches (at most ``most``) with the
    largest mean ``saliency`` [H, W], without those whose centre is not ``known`` (bool [H, W]) and those of none.
    Ties go to the upper left patch, so there is nothing random."""
    height, width = saliency.shape
    mean = torch.nn.functional.avg_pool2d(saliency[None, None], patch)[0, 0]
    rows, columns = mean.shape
    centre = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1) * patch
    centre = (centre + patch // 2).reshape(-1, 2)
    order = mean.flatten().argsort(descending=True, stable=True)[: min(int(share * mean.numel()), most)]
    v, u = centre[order].unbind(-1)
    keep = known[v, u] & (mean.flatten()[order] > 0)
    return torch.stack([u[keep], v[keep]], -1) + 0.5


def reprojection(points: Tensor, source: int, tracks: Tensor, confidence: Tensor, geometry: Geometry) -> Tensor:
    """Distance [N, F], in shares of the diagonal, between where depth and cameras put a point and where it is seen.

    ``points`` (u, v) [N, 2] in frame ``source``; ``tracks`` [N, F, 2] their positions in all frames with ``confidence``
    [N, F]. NaN where nothing is compared: the source frame, unknown depth, behind the camera, outside the image,
    confidence below 0.05. Unchanged when depth and translation are scaled together.
    """
    assert geometry.depth is not None
    height, width = geometry.depth.shape[1:]
    v, u = points[:, 1].long(), points[:, 0].long()
    depth = geometry.depth[source, v, u]
    world = lift(points, depth, geometry.w2c[source], geometry.lenses[source])
    out = torch.full(tracks.shape[:2], torch.nan)
    for j in range(tracks.shape[1]):
        if j == source:
            continue
        expected, _ = project(world, geometry.w2c[j], geometry.lenses[j])
        compare = inside(expected, height, width) & inside(tracks[:, j], height, width) & (depth > NEAR)
        compare &= (confidence[:, j] >= SEEN) & (confidence[:, source] >= SEEN)
        distance = (expected - tracks[:, j]).norm(dim=-1) / diagonal(height, width)
        out[:, j] = torch.where(compare, distance, torch.nan)
    return out


def redraw(frames: Tensor, geometry: Geometry, *, least: float = 0.1) -> Tensor:
    """Each of ``frames`` [F, 3, H, W] drawn from the points of the *others*, NaN where none of them is seen.

    Every pixel with a known depth of confidence ``least`` becomes one coloured point; the nearest (within 2 %) are
    averaged in the pixel they fall into. A frame's own points are left out: with them depth noise would be measured,
    not consistency.
    """
    assert geometry.depth is not None
    count, _, height, width = frames.shape
    grid, colours = pixel_centres(height, width), frames.permute(0, 2, 3, 1)
    known = geometry.depth > NEAR
    if geometry.confidence is not None:
        known = known & (geometry.confidence >= least)
    every = zip(known, geometry.depth, geometry.w2c, geometry.lenses)
    world = [lift(grid[seen], depth[seen], w2c, k) for seen, depth, w2c, k in every]
    out = torch.full((count, height * width, 3), torch.nan)
    for j in range(count):
        others = [i for i in range(count) if i != j]
        if not others:
            continue
        xy, z = project(torch.cat([world[i] for i in others]), geometry.w2c[j], geometry.lenses[j])
        colour = torch.cat([colours[i][known[i]] for i in others])
        seen = inside(xy, height, width)
        xy, z, colour = xy[seen].long(), z[seen], colour[seen]
        cell = xy[:, 1] * width + xy[:, 0]
        nearest = torch.full((height * width,), torch.inf).scatter_reduce(0, cell, z, "amin")
        front = z <= 1.02 * nearest[cell]
        total = torch.zeros(height * width, 4).index_add(
            0, cell[front], torch.cat([colour[front], torch.ones_like(z[front])[:, None]], 1)
        )
        covered = total[:, 3] > 0
        out[j, covered] = total[covered, :3] / total[covered, 3:]
    return out.reshape(count, height, width, 3).permute(0, 3, 1, 2)


def rerender(frames: Tensor, geometry: Geometry, *, least: float = 0.1) -> tuple[Tensor, Tensor]:
    """Error [F] and coverage [F], both in [0, 1], of :func:`redraw`: mean absolute colour difference over the pixels
    covered, NaN where none is, and their share."""
    difference = (redraw(frames, geometry, least=least) - frames).abs()
    return difference.nanmean((1, 2, 3)), difference[:, 0].isfinite().float().mean((1, 2))
