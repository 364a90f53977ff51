"""The backends by published networks, with stand-ins for their packages that answer with the truth about a room in
*their* conventions: what a reward makes of that is what it makes of the truth. No published weights are here."""

import sys
import warnings
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from arvideo_rl.world.geometry import geometry_of_room
from arvideo_rl.world.rooms import room
from rewards.contract import Clips, score
from rewards.geometry.backends import GroundTruth, backend
from rewards.geometry.cameras import Cameras, Geometry, lift, project
from rewards.geometry.depth_anything import DepthAnything3
from rewards.geometry.pretrained import as_geometry, repeatable
from rewards.geometry.vggt import VGGT
from rewards.registry import build

FRAMES, SIZE, TOP = 8, 98, 7  # rooms are square; without their top and bottom rows they are 84 x 98, multiples of 14
KINDS = {"depth_anything_3": DepthAnything3, "vggt": VGGT}
NAMES = ("reprojection", "rerender", "camera_smoothness", "camera_following")


def cropped(made, rows):
    """Frames and geometry of a room without ``rows`` rows at the top and at the bottom; the scale counts as unknown."""
    known, shift = geometry_of_room(made), torch.tensor([[0, 0, 0], [0, 0, rows], [0, 0, 0.0]])
    k = known.intrinsics - shift
    return made.frames[:, :, rows:-rows], Geometry(known.depth[:, rows:-rows].contiguous(), known.w2c, k)


PAIRS = [cropped(room(seed, FRAMES, SIZE), TOP) for seed in range(2)]
CLIPS = torch.stack([frames for frames, _ in PAIRS])
TRUTH = [truth for _, truth in PAIRS]
CAMERAS = Cameras(torch.stack([torch.linalg.inv(t.w2c) for t in TRUTH]))
LARGE = [cropped(room(seed, FRAMES, 2 * SIZE), 2 * TOP)[1] for seed in range(2)]  # the same seen twice as large


def theirs(truth):
    """``truth`` as both networks put it: world-to-camera [F, 3, 4] with OpenCV axes in a world of another place and
    size, depth along z, one lens a frame, surety 1 + exp(x)."""
    away = torch.linalg.inv(truth.w2c[3])  # their world is that of a frame of their choice
    w2c, scale = truth.w2c @ away, 0.37
    w2c[:, :3, 3] *= scale
    return {"depth": truth.depth * scale, "surety": torch.full_like(truth.depth, 1 + np.e**4), "w2c": w2c[:, :3],
            "k": truth.lenses.clone()}  # fmt: skip


class Recognising(torch.nn.Module):
    """Answers about the clip that it is shown, which must be one of CLIPS, in RGB and in its range."""

    answers = TRUTH

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))

    def of(self, pictures, size):
        small = interpolate(pictures, CLIPS.shape[3:], mode="area")
        which = [i for i, clip in enumerate(CLIPS) if float((small - clip).abs().mean()) < 0.02]
        assert len(which) == 1, "these are not the pictures of one clip as float RGB in [0, 1]"
        truth = self.answers[which[0]]
        assert max(truth.depth.shape) == size, "a network answers at the size at which it sees"
        return theirs(truth)


class FakeDepthAnything(Recognising):
    """depth_anything_3.api.DepthAnything3, as far as it is used: arrays in, a Prediction of arrays out."""

    extra = {}

    @classmethod
    def from_pretrained(cls, folder, *, strict=False, local_files_only=False):
        assert strict and local_files_only
        print("Loading weights from local directory")
        made = cls()
        made.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=strict)
        return made

    def inference(self, image, process_res=504):
        assert all(x.dtype == np.uint8 and x.shape[2] == 3 for x in image)
        found = self.of(torch.from_numpy(np.stack(image)).permute(0, 3, 1, 2) / 255, process_res)
        parts = {"depth": "depth", "conf": "surety", "extrinsics": "w2c", "intrinsics": "k"}
        return SimpleNamespace(**{k: found[v].numpy() for k, v in parts.items()}, sky=None, is_metric={}, **self.extra)


class FakeVGGT(Recognising):
    """vggt.models.vggt.VGGT: a batch of pictures in, a dictionary of tensors out."""

    def __init__(self):
        super().__init__()
        self.point_head = self.track_head = torch.nn.Identity()

    def forward(self, images):
        found = self.of(images[0], max(images.shape[3:]))
        h, w = found["depth"].shape[1:]
        fov = [2 * torch.atan(side / 2 / found["k"][:, i, i]) for i, side in ((1, h), (0, w))]
        pose = torch.cat([found["w2c"][:, :, 3], quaternions(found["w2c"][:, :, :3]), torch.stack(fov, 1)], 1)
        return {"pose_enc": pose[None], "depth": found["depth"][None, ..., None], "depth_conf": found["surety"][None]}


def quaternions(rotation):
    """(x, y, z, w) [F, 4] of rotations [F, 3, 3] below half a turn."""
    w = (1 + rotation.diagonal(dim1=1, dim2=2).sum(1)).sqrt() / 2
    skew = rotation - rotation.mT
    return torch.stack([*(skew[:, i, j] / (4 * w) for i, j in ((2, 1), (0, 2), (1, 0))), w], 1)


def decoded(pose_enc, image_size_hw):
    """vggt.utils.pose_enc.pose_encoding_to_extri_intri: translation, quaternion, vertical and horizontal angle."""
    move, (x, y, z, w), (up, across) = pose_enc[..., :3], pose_enc[..., 3:7].unbind(-1), pose_enc[..., 7:].unbind(-1)
    zero, (h, wide) = torch.zeros_like(x), image_size_hw
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    k = torch.zeros(*x.shape, 3, 3)
    k[..., 0, 0], k[..., 1, 1] = wide / 2 / torch.tan(across / 2), h / 2 / torch.tan(up / 2)
    k[..., 0, 2], k[..., 1, 2], k[..., 2, 2] = wide / 2, h / 2, 1
    rotation = torch.eye(3) + 2 * w[..., None, None] * cross + 2 * cross @ cross
    return torch.cat([rotation, move[..., None]], -1), k


@pytest.fixture(params=list(KINDS))
def kind(request, monkeypatch):
    """The name of a backend whose package is a stand-in."""
    modules = {
        "depth_anything_3": {"api": {"DepthAnything3": FakeDepthAnything}, "utils": {},
                             "utils.logger": {"logger": SimpleNamespace(level=2)}},
        "vggt": {"models": {}, "models.vggt": {"VGGT": FakeVGGT}, "utils": {},
                 "utils.pose_enc": {"pose_encoding_to_extri_intri": decoded}},
    }[request.param]  # fmt: skip
    for name, inside in {"": {}, **modules}.items():
        module = ModuleType(f"{request.param}.{name}".rstrip("."))
        vars(module).update(inside)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return request.param


@pytest.fixture
def weights(tmp_path):
    """A folder such as comes from the hub, for the stand-ins."""
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_name": "da3-base"}')
    return tmp_path


def made(kind, weights, **args):
    return KINDS[kind](**{"weights": weights, "size": SIZE} | args)


def values(name, chosen):
    return score(build(name, backend=chosen), Clips(CLIPS, cameras=CAMERAS))


@pytest.mark.filterwarnings("ignore:geometry .* uses")
@pytest.mark.parametrize("name", NAMES)
def test_a_reward_makes_of_their_answer_what_it_makes_of_the_truth(name, kind, weights):
    expected, got = values(name, GroundTruth(TRUTH)), values(name, made(kind, weights))
    assert expected.valid.all() and len(set(expected.value.tolist())) == 2
    torch.testing.assert_close(got.value, expected.value, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:geometry .* uses")
def test_what_was_seen_at_another_size_comes_back_to_that_of_the_frames(kind, weights, monkeypatch):
    monkeypatch.setattr(Recognising, "answers", LARGE)
    chosen = made(kind, weights, size=2 * SIZE)
    found = chosen.geometry(Clips(CLIPS), 0)
    assert found.depth.shape == found.confidence.shape == CLIPS.shape[1:2] + CLIPS.shape[3:]
    torch.testing.assert_close(found.lenses, TRUTH[0].lenses)
    torch.testing.assert_close(found.confidence, torch.full_like(found.depth, np.e**4 / (1 + np.e**4)))
    ratio = found.depth / TRUTH[0].depth / 0.37
    exact = ((ratio - 1).abs() < 1e-5).float().mean()  # at the edges two surfaces mix
    assert float((ratio - 1).abs().median()) < 1e-6 and float(exact) > 0.6
    got, expected = values("reprojection", chosen), values("reprojection", GroundTruth(TRUTH))
    torch.testing.assert_close(got.value, expected.value, rtol=0, atol=0.03)


def test_a_plane_keeps_its_depth_when_it_is_resized():
    """Unlike depth, its inverse is linear in the picture."""
    k = torch.tensor([[40.0, 0, 28], [0, 30, 21], [0, 0, 1]])
    v, u = torch.meshgrid(torch.arange(42) + 0.5, torch.arange(56) + 0.5, indexing="ij")
    depth = 1 / (0.2 + 0.004 * u + 0.006 * v)
    found = as_geometry(depth=depth[None], surety=torch.full((1, 42, 56), 2.0), w2c=torch.eye(4)[None],
                        intrinsics=k[None], height=84, width=168)  # fmt: skip
    y, x = (torch.arange(84) + 0.5) / 2, (torch.arange(168) + 0.5) / 3
    expected = 1 / (0.2 + 0.004 * x + 0.006 * y[:, None])
    torch.testing.assert_close(found.depth[0, 2:-2, 3:-3], expected[2:-2, 3:-3])
    torch.testing.assert_close(found.lenses[0], torch.tensor([[120.0, 0, 84], [0, 60, 42], [0, 0, 1]]))
    assert float(found.confidence.min()) == float(found.confidence.max()) == 0.5


def test_every_frame_keeps_its_own_lens():
    """A zoom: one depth and one place, another focal length in each frame."""
    wide, tele = (torch.tensor([[f, 0, 32], [0, f, 32], [0, 0, 1.0]]) for f in (40, 60))
    zoom = Geometry(torch.full((2, 64, 64), 2.0), torch.eye(4).repeat(2, 1, 1), torch.stack([wide, tele]))
    points = torch.tensor([[40.5, 30.5], [20.5, 20.5]])
    world = lift(points, torch.full((2,), 2.0), zoom.w2c[0], wide)
    tracks = torch.stack([points, project(world, zoom.w2c[1], tele)[0]], 1)
    from rewards.four_d.terms import rigid_flow
    from rewards.geometry.reprojection import reprojection

    error = reprojection(points, 0, tracks, torch.ones(2, 2), zoom)[:, 1]
    torch.testing.assert_close(error, torch.zeros(2), rtol=0, atol=1e-6)
    assert float(reprojection(points, 0, tracks, torch.ones(2, 2), replace(zoom, intrinsics=wide))[:, 1].min()) > 0.02
    v, u = points[:, 1].long(), points[:, 0].long()
    torch.testing.assert_close(rigid_flow(zoom)[0][0, v, u], tracks[:, 1] - points)
    assert torch.equal(zoom.at(slice(1, None)).lenses, tele[None])


def test_nothing_is_printed_or_drawn_and_the_licence_is_said_once(kind, weights, capsys):
    before, chosen = torch.get_rng_state(), made(kind, weights)
    with pytest.warns(UserWarning, match=rf"geometry {kind} uses .*licence: ") as said:
        chosen.prepare()
    with warnings.catch_warnings(action="error"):
        first, second = (chosen.geometry(Clips(CLIPS), 1) for _ in range(2))
    assert len(said) == 1 and torch.equal(first.depth, second.depth)
    assert capsys.readouterr().out == "" and torch.equal(torch.get_rng_state(), before)
    assert not any(p.requires_grad for p in chosen.network.parameters())


@pytest.mark.parametrize(
    ("kind_", "name", "says"),
    [("depth_anything_3", "DA3-BASE", "Apache-2.0"), ("depth_anything_3", "DA3-SMALL", "Apache-2.0"),
     ("depth_anything_3", "DA3-LARGE-1.1", "CC BY-NC 4.0"),
     ("depth_anything_3", "DA3NESTED-GIANT-LARGE-1.1", "CC BY-NC 4.0"), ("vggt", "VGGT-1B", "CC BY-NC 4.0"),
     ("vggt", "VGGT-1B-Commercial", "commercial but not military"), ("vggt", "other", "unstated")],
)  # fmt: skip
def test_licences(kind_, name, says):
    owner = "depth-anything" if kind_ == "depth_anything_3" else "facebook"
    chosen = {"target": kind_, "args": {"weights": f"{owner}/{name}"}}
    assert says in backend(chosen).licence and backend(chosen).name == f"{kind_} {name}"
    reward = build("reprojection", backend=chosen)
    assert says in reward.licence and list(reward.hub) == [f"{owner}/{name}"]


@pytest.mark.filterwarnings("ignore:geometry .* uses")
def test_the_sky_and_what_has_no_depth_are_unknown(kind, weights, monkeypatch):
    depth = TRUTH[0].depth.clone()
    depth[:, :10], depth[:, 10:20, :5] = -1, torch.inf
    monkeypatch.setattr(Recognising, "answers", [replace(TRUTH[0], depth=depth), TRUTH[1]])
    found = made(kind, weights).geometry(Clips(CLIPS), 0)
    gone = torch.zeros(CLIPS.shape[3:], dtype=torch.bool)
    gone[:10], gone[10:20, :5] = True, True
    assert torch.equal(found.depth.isnan(), gone.expand_as(found.depth)) and (found.confidence[:, gone] == 0).all()
    if kind == "depth_anything_3":
        monkeypatch.setattr(FakeDepthAnything, "extra", {})
        sky = np.zeros((FRAMES, *CLIPS.shape[3:]), bool)
        sky[:, 30:] = True
        monkeypatch.setattr(FakeDepthAnything, "inference", _with(FakeDepthAnything.inference, sky=sky, is_metric=1))
        found = made(kind, weights).geometry(Clips(CLIPS), 1)
        assert found.metric and found.depth[:, 30:].isnan().all() and found.depth[:, :30].isfinite().all()


def _with(method, **fields):
    def changed(*args, **kwargs):
        return SimpleNamespace(**vars(method(*args, **kwargs)) | fields)

    return changed


@pytest.mark.filterwarnings("ignore:geometry .* uses")
def test_cameras_that_are_not_finite_are_a_reason(kind, weights, monkeypatch):
    lost = replace(TRUTH[0], w2c=TRUTH[0].w2c * torch.tensor([1, 1, 1, torch.nan]))
    monkeypatch.setattr(Recognising, "answers", [lost, TRUTH[1]])
    got = values("reprojection", made(kind, weights))
    assert got.reasons == ["system:not_finite", None] and got.valid.tolist() == [False, True]


def test_what_random_numbers_are_drawn_is_the_same_and_leaves_no_trace():
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with repeatable(torch.device("cpu")):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)


def refused(says, call):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line_with_the_command(kind, weights, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)
    refused(rf"geometry {kind} cannot import {kind} .*pip install .*--no-deps", made(kind, weights).prepare)


def test_missing_weights_are_one_line_with_the_command_and_nothing_is_fetched(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", _local_only(huggingface_hub.snapshot_download))
    refused(rf"geometry {kind}: the weights .* are not here .*'hf download \S+ .*model", KINDS[kind]().prepare)
    refused("there are no weights at /none/w", made(kind, "/none/w").prepare)
    refused("holds none of|is no folder with", made(kind, tmp_path).prepare)


def _local_only(look):
    def looked(*args, local_files_only=False, **kwargs):
        return look(*args, local_files_only=True, **kwargs) if local_files_only else pytest.fail("it would be fetched")

    return looked


def test_weights_that_do_not_fit_are_refused(kind, weights):
    for tensors in (
        {"weight": torch.ones(2), "more": torch.ones(1)},
        {"other": torch.ones(2)},
        {"weight": torch.ones(3)},
    ):
        save_file(tensors, weights / "model.safetensors")
        refused(rf"geometry {kind}: ", made(kind, weights).prepare)
    (weights / "model.safetensors").write_bytes(b"x")
    refused(rf"geometry {kind}: cannot (load|read) ", made(kind, weights).prepare)


@pytest.mark.filterwarnings("ignore:geometry .* uses")
def test_frames_that_are_too_small_and_sizes_that_cannot_be_are_refused(kind, weights):
    small = Clips(CLIPS[..., :24, :24])
    refused(
        "frames are 24x24; the network would see them more than 4 times", lambda: made(kind, weights).geometry(small, 0)
    )
    for size in (0, 14, 100, 98.5):
        refused(f"size is {size!r}; it is a whole multiple of 14", lambda size=size: made(kind, weights, size=size))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"depth": torch.ones(3, 8, 8, 1)}, r"depth \(3, 8, 8, 1\)"), ({"surety": torch.ones(3, 4, 4)}, "surety"),
     ({"w2c": torch.eye(3).repeat(3, 1, 1)}, r"w2c \(3, 3, 3\)"), ({"w2c": torch.eye(4).repeat(2, 1, 1)}, "w2c"),
     ({"intrinsics": torch.eye(3)}, r"K \(3, 3\)")],
)  # fmt: skip
def test_answers_of_another_shape_are_refused(change, says):
    good = {"depth": torch.ones(3, 8, 8), "surety": torch.full((3, 8, 8), 2.0), "w2c": torch.eye(4).repeat(3, 1, 1),
            "intrinsics": torch.eye(3).repeat(3, 1, 1)}  # fmt: skip
    assert isinstance(as_geometry(**good, height=16, width=8), Geometry)
    refused(says, lambda: as_geometry(**good | change, height=16, width=8))


def test_sizes_without_cameras_are_refused(weights, monkeypatch, request):
    chosen = made("depth_anything_3", weights)
    depth = np.ones((FRAMES, 84, 98))
    chosen.__dict__["network"] = net = FakeDepthAnything()
    net.inference = lambda *a, **k: SimpleNamespace(depth=depth, conf=None, extrinsics=None, intrinsics=None, sky=None)
    refused("gives no cameras; choose of depth-anything/DA3-SMALL", lambda: chosen.geometry(Clips(CLIPS), 0))


@pytest.mark.parametrize(
    ("choice", "says"),
    [({"target": "vggt", "args": {"siz": 3}}, "geometry backend 'vggt' has no argument 'siz'; did you mean 'size'"),
     ({"args": {}}, "geometry backend has args; give it target"), ({"target": "vgg"}, "did you mean 'vggt'"),
     ({"target": "classical", "weights": 1}, "geometry backend has target, weights")],
)  # fmt: skip
def test_a_backend_with_arguments_is_checked(choice, says):
    refused(says, lambda: backend(choice))
    assert backend({"target": "classical", "args": {"field_of_view": 65}}).field_of_view == 65


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_package_loads_strictly_and_answers_as_expected(tmp_path, capsys):
    """Random weights: that the package takes and gives what the stand-in does."""
    api = pytest.importorskip("depth_anything_3.api")
    with torch.random.fork_rng(devices=[]):
        api.DepthAnything3(model_name="da3-small").save_pretrained(tmp_path)
    capsys.readouterr()
    chosen, before = DepthAnything3(tmp_path, size=SIZE), torch.get_rng_state()
    chosen.prepare()
    first, second = (chosen.geometry(Clips(CLIPS), 0) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and capsys.readouterr().out == ""
    assert torch.equal(first.depth, second.depth) and not first.metric
    assert first.depth.shape == (FRAMES, 84, 98) and (first.depth > 0).all() and (first.confidence > 0).all()
    assert first.w2c.shape == (FRAMES, 4, 4) and first.lenses.shape == (FRAMES, 3, 3)
    assert (first.lenses[:, 0, 2] == 49).all() and (first.lenses[:, 1, 2] == 42).all()
    larger = interpolate(CLIPS[0], (120, 140), mode="bilinear")[None]
    assert chosen.geometry(Clips(larger), 0).depth.shape == (FRAMES, 120, 140)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.cam_dec.fc_fov.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused("cannot load .*fc_fov.0.weight", DepthAnything3(tmp_path, size=SIZE).prepare)
