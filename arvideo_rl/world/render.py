"""Render scenes by analytic ray casting: RGB and the ground truth by which rewards are judged.

Rays leave the camera with unit z in camera axes, so the parameter along a ray *is* the z-depth. Colours are linear
mixes of small palettes; the ground, sky and hills are kept dull so that an object's colour is its own.
Shape letters: B clips, T frames, O object slots, R rays (H * W * supersample^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.world.scene import Scenes

FIELD_OF_VIEW = 65.0  # degrees, horizontal and vertical
FAR = 60.0  # metres; the depth written where a ray meets the sky
GROUND = torch.tensor([[[0.78, 0.74, 0.68], [0.40, 0.37, 0.34]], [[0.66, 0.70, 0.74], [0.30, 0.33, 0.37]],
                       [[0.84, 0.80, 0.64], [0.52, 0.44, 0.34]]])  # fmt: skip
SKY = torch.tensor([[[0.52, 0.66, 0.82], [0.86, 0.89, 0.92]], [[0.58, 0.54, 0.66], [0.95, 0.84, 0.74]]])
HILL = torch.tensor([[0.36, 0.44, 0.38], [0.36, 0.30, 0.36]])
LIGHT = torch.nn.functional.normalize(torch.tensor([-0.5, -0.8, -0.45]), dim=0)  # towards the light


@dataclass(frozen=True)
class Truth:
    """Ground truth at pixel centres. ``world`` = points where a ray ends; sky has depth FAR and ``valid`` False."""

    depth: Tensor  # [B, T, H, W] z-depth in metres
    valid: Tensor  # [B, T, H, W] bool, False on sky
    w2c: Tensor  # [B, T, 3, 4]
    intrinsics: Tensor  # [3, 3], row 0 divided by W and row 1 by H; pixel centres lie at half-integers
    masks: Tensor  # [B, T, O, H, W] bool
    scene_flow: Tensor  # [B, T-1, H, W, 3] world displacement of the point seen at t, until t + 1


def intrinsics() -> Tensor:
    """Normalised pinhole matrix [3, 3] (x / W, y / H), the same for every clip."""
    focal = 0.5 / torch.tan(torch.deg2rad(torch.tensor(FIELD_OF_VIEW / 2)))
    return torch.tensor([[focal, 0, 0.5], [0, focal, 0.5], [0, 0, 1.0]])


def camera_rotation(scenes: Scenes) -> Tensor:
    """Camera-to-world rotations [B, T, 3, 3]: pitch about x, then yaw about y."""
    yaw, pitch = scenes.yaw, scenes.pitch[:, None].expand_as(scenes.yaw)
    cy, sy, cp, sp = yaw.cos(), yaw.sin(), pitch.cos(), pitch.sin()
    zero = torch.zeros_like(yaw)
    right = torch.stack([cy, zero, -sy], -1)
    down = torch.stack([-sy * sp, cp, -cy * sp], -1)
    forward = torch.stack([sy * cp, sp, cy * cp], -1)
    return torch.stack([right, down, forward], -1)


def _rays(scenes: Scenes, size: int) -> Tensor:
    """Ray directions in the world [B, T, R, 3], one per pixel centre of a size x size image."""
    at = (torch.arange(size) + 0.5) / size - 0.5
    focal = intrinsics()[0, 0]
    y, x = torch.meshgrid(at / focal, at / focal, indexing="ij")
    rays = torch.stack([x.flatten(), y.flatten(), torch.ones(size * size)], -1)
    return torch.einsum("btij,rj->btri", camera_rotation(scenes), rays)


def _hit_object(origin: Tensor, rays: Tensor, scenes: Scenes, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distance [B, T, R] (inf where missed), unit normal and local point [B, T, R, 3] on the object in ``slot``."""
    centre = scenes.centre[:, :, slot]
    radius = scenes.radius[:, slot, None, None]
    spin = scenes.spin[:, :, slot, None]
    o = origin - centre[:, :, None]
    # ball
    a, b = (rays * rays).sum(-1), (rays * o).sum(-1)
    root = b * b - a * ((o * o).sum(-1) - radius * radius)
    ball = torch.where(root > 0, (-b - root.clamp_min(0).sqrt()) / a, torch.inf)
    ball_normal = (o + ball.nan_to_num(posinf=0)[..., None] * rays) / radius[..., None]
    c, s = spin.cos(), spin.sin()  # rolling right turns the top towards +x
    ball_local = torch.stack([c * ball_normal[..., 0] + s * ball_normal[..., 1],
                              -s * ball_normal[..., 0] + c * ball_normal[..., 1], ball_normal[..., 2]], -1)  # fmt: skip
    # cube, in axes turned by its yaw

    def turn(v: Tensor, sign: float) -> Tensor:
        return torch.stack([c * v[..., 0] - sign * s * v[..., 2], v[..., 1], sign * s * v[..., 0] + c * v[..., 2]], -1)

    oc, rc = turn(o.expand_as(rays), 1.0), turn(rays, 1.0)
    rc = torch.where(rc.abs() < 1e-6, 1e-6, rc)
    near, far = (-radius[..., None] * rc.sign() - oc) / rc, (radius[..., None] * rc.sign() - oc) / rc
    enter, axis = near.max(-1)
    cube = torch.where(enter < far.min(-1).values, enter, torch.inf)
    face = -torch.nn.functional.one_hot(axis, 3).float() * rc.sign()
    cube_normal, cube_local = turn(face, -1.0), face
    is_cube = scenes.is_cube[:, slot, None, None]
    distance = torch.where(is_cube, cube, ball)
    distance = torch.where((distance > 0.05) & scenes.present[:, slot, None, None], distance, torch.inf)
    return (distance, torch.where(is_cube[..., None], cube_normal, ball_normal),
            torch.where(is_cube[..., None], cube_local, ball_local))  # fmt: skip


def _trace(scenes: Scenes, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Colour [B, T, R, 3], depth [B, T, R], owner [B, T, R] (-2 sky, -1 ground, else slot), rays [B, T, R, 3]."""
    rays = _rays(scenes, size)
    origin = scenes.camera[:, :, None]
    sky = SKY[scenes.sky][:, None, None]  # [B, 1, 1, 2, 3]
    horizon = sky[..., 1, :]

    elevation = -rays[..., 1] / rays[..., [0, 2]].norm(dim=-1)
    colour = torch.lerp(horizon, sky[..., 0, :], (elevation / 0.45).clamp(0, 1)[..., None])
    azimuth = torch.atan2(rays[..., 0], rays[..., 2])
    amp, freq, phase = (scenes.hills[:, :, i][:, None, None] for i in range(3))
    ridge = 0.07 + (amp * torch.sin(freq * azimuth[..., None] + phase)).sum(-1)
    hill = torch.lerp(HILL[scenes.sky][:, None, None], horizon, 0.25)
    colour = torch.where((elevation < ridge)[..., None], hill, colour)
    depth = torch.full_like(elevation, torch.inf)
    owner = torch.full_like(elevation, -2, dtype=torch.long)

    down = rays[..., 1]
    ground = torch.where(down > 1e-4, -origin[..., 1] / down.clamp_min(1e-4), torch.inf)
    on_ground = ground < FAR
    point = origin + ground.clamp_max(FAR)[..., None] * rays
    scale, angle, px, pz = (scenes.checker[:, i, None, None] for i in range(4))
    u = (angle.cos() * point[..., 0] - angle.sin() * point[..., 2]) / scale + px
    w = (angle.sin() * point[..., 0] + angle.cos() * point[..., 2]) / scale + pz
    dark = ((u.floor() + w.floor()) % 2 == 0).float()
    dark = 0.5 + (dark - 0.5) * torch.exp(-((ground.clamp_max(FAR) / 8) ** 2))  # squares below a pixel fade to grey
    floor = GROUND[scenes.ground][:, None, None]
    floor = torch.lerp(floor[..., 0, :], floor[..., 1, :], dark[..., None])
    for slot in range(scenes.present.shape[1]):
        centre, radius = scenes.centre[:, :, None, slot], scenes.radius[:, slot, None, None]
        away = (point[..., [0, 2]] - centre[..., [0, 2]]).pow(2).sum(-1) / (radius * radius)
        lift = (-centre[..., 1] - radius).clamp_min(0)
        shade = 0.55 * torch.exp(-0.9 * away - 1.2 * lift) * scenes.present[:, slot, None, None]
        floor = floor * (1 - shade[..., None])
    fog = 1 - torch.exp(-0.07 * ground.clamp_max(FAR))
    colour = torch.where(on_ground[..., None], torch.lerp(floor, horizon, fog[..., None]), colour)
    depth, owner = torch.where(on_ground, ground, depth), torch.where(on_ground, -1, owner)

    for slot in range(scenes.present.shape[1]):
        distance, normal, local = _hit_object(origin, rays, scenes, slot)
        lit = 0.50 + 0.55 * (normal * LIGHT).sum(-1).clamp_min(0)
        stripe = torch.where(local[..., 0] * local[..., 1] > 0, 1.0, 0.62)  # quarters, so that rolling shows
        lit = lit * torch.where(scenes.is_cube[:, slot, None, None], 1.0, stripe)
        nearer = distance < depth
        surface = scenes.colour[:, slot, None, None] * lit[..., None]
        colour = torch.where(nearer[..., None], surface.clamp(0, 1), colour)
        depth, owner = torch.where(nearer, distance, depth), torch.where(nearer, slot, owner)
    return colour, depth, owner, rays


@torch.no_grad()
def render(scenes: Scenes, size: int = 32, *, supersample: int = 2) -> Tensor:
    """Draw scenes as RGB [B, T, 3, size, size] in [0, 1], anti-aliased over supersample^2 rays a pixel."""
    colour = _trace(scenes, size * supersample)[0]
    b, t = colour.shape[:2]
    image = colour.reshape(b * t, size * supersample, size * supersample, 3).permute(0, 3, 1, 2)
    return torch.nn.functional.avg_pool2d(image, supersample).reshape(b, t, 3, size, size)


@torch.no_grad()
def truth(scenes: Scenes, size: int = 32) -> Truth:
    """Ground truth of the same views at pixel centres; see :class:`Truth`."""
    _, depth, owner, rays = _trace(scenes, size)
    b, t = depth.shape[:2]
    slots = scenes.present.shape[1]
    valid = owner > -2
    depth = torch.where(valid, depth, FAR)
    rotation = camera_rotation(scenes).transpose(-1, -2)
    w2c = torch.cat([rotation, -(rotation @ scenes.camera[..., None])], -1)
    masks = torch.stack([owner == slot for slot in range(slots)], 2)

    point = scenes.camera[:, :, None] + depth[..., None] * rays
    flow = torch.zeros_like(point[:, :-1])
    for slot in range(slots):
        centre = scenes.centre[:, :, slot]
        turned = torch.where(scenes.is_cube[:, slot, None], 0.0, (scenes.spin[:, 1:, slot] - scenes.spin[:, :-1, slot]))
        arm = point[:, :-1] - centre[:, :-1, None]
        c, s = turned.cos()[..., None], turned.sin()[..., None]
        moved = torch.stack([c * arm[..., 0] - s * arm[..., 1], s * arm[..., 0] + c * arm[..., 1], arm[..., 2]], -1)
        shift = moved + centre[:, 1:, None] - point[:, :-1]
        flow = torch.where((owner[:, :-1] == slot)[..., None], shift, flow)
    shape = (b, t, size, size)
    return Truth(depth.reshape(shape), valid.reshape(shape), w2c, intrinsics(),
                 masks.reshape(b, t, slots, size, size), flow.reshape(b, t - 1, size, size, 3))  # fmt: skip
