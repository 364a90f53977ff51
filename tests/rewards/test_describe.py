"""What rewards say of themselves, and what is found missing: modules, weights, damaged weights."""

import shutil
from pathlib import Path

import pytest

from rewards import inverse_dynamics, registry
from rewards.describe import backend_lacks, declared, describe, lacking, optional, required

ROOT = Path(__file__).parents[2]
SAYS = ("formula", "licence", "hacked_by", "cost")


@pytest.mark.parametrize("name", registry.available())
def test_every_shipped_reward_says_what_it_is_and_has_a_page(name):
    about = describe(name)
    for key in SAYS if name != "remote" else ("formula", "cost"):
        assert about[key] and about[key] != "unstated" and "\n" not in about[key], key
    assert (ROOT / about["page"]).is_file()
    if optional(name) and not required(name):
        assert (about["download"] > 1e9 and about["files"]) or registry.resolve(name).modules
    else:
        assert about["download"] == 0 and lacking(name) == []


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """``hub(repository, {file: bytes})`` puts files where the hub's would lie; before that there are none."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def fetched(repo, files):
        at = tmp_path / f"models--{repo.replace('/', '--')}"
        for name, content in files.items():
            file = at / "snapshots" / "0a1b" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        (at / "refs").mkdir(exist_ok=True)
        (at / "refs" / "main").write_text("0a1b")

    return fetched


def test_weights_of_the_hub_are_missing_here_or_damaged_and_never_fetched_to_find_out(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it asked the network"))
    path, fetch = "xswu/HPSv2/HPS_v2.1_compressed.pt", "hf download xswu/HPSv2 HPS_v2.1_compressed.pt"
    assert describe("hpsv2")["files"] == {path: None}
    assert lacking("hpsv2") == [("weights xswu/HPSv2", fetch)]
    hub("xswu/HPSv2", {"README.md": b"x"})
    assert lacking("hpsv2") == [("weights xswu/HPSv2", fetch)]
    hub("xswu/HPSv2", {"HPS_v2.1_compressed.pt": b"12345"})
    assert describe("hpsv2")["files"] == {path: 5} and lacking("hpsv2", read=False) == []
    ((what, how),) = lacking("hpsv2")
    assert "hpsv2: cannot read weights" in what and how == f"{fetch} --force-download"


def test_a_reward_lacks_each_of_its_parts_until_all_are_here(hub, monkeypatch, tmp_path):
    from rewards.preference import video_reward as v

    rubric = tmp_path / "rubric.txt"
    monkeypatch.setattr(v.VideoReward, "files", {rubric: "get the rubric"})
    monkeypatch.setattr(v.VideoReward.__init__, "__defaults__", (v.HUB, v.BASE, rubric, "mean", True))
    assert [what for what, _ in lacking("video_reward")] == [f"weights {x}" for x in (rubric, v.HUB, v.BASE)]
    rubric.write_text("{text_prompt} " + " ".join(v.TOKENS))
    hub(v.HUB, {"model_config.json": b"{}"})
    hub(v.BASE, dict.fromkeys(v.BASE_FILES, b"{}"))
    include = " ".join(f"--include '{f}'" for f in v.FILES)
    assert lacking("video_reward") == [(f"weights {v.HUB}", f"hf download {v.HUB} {include}")]
    hub(v.HUB, {"checkpoint-7/model.pth": b"x"})
    assert lacking("video_reward", read=False) == []
    ((what, how),) = lacking("video_reward")
    assert "model_config.json" in what and "--force-download" in how


def test_a_published_backend_lacks_its_package_and_its_weights_until_they_are_here(hub, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module, weights = backend_lacks("depth_anything_3")
    assert module[0] == "Python module depth_anything_3" and "--no-deps depth-anything-3" in module[1]
    fetch = "hf download depth-anything/DA3-BASE config.json model.safetensors"
    assert weights == ("weights depth-anything/DA3-BASE", fetch)
    path = "depth-anything/DA3-BASE/model.safetensors"
    assert describe("rerender", backend="depth_anything_3")["files"][path] is None
    hub("depth-anything/DA3-BASE", {"config.json": b"{}", "model.safetensors": b"1234"})
    assert backend_lacks("depth_anything_3") == [module]
    assert describe("rerender", backend="depth_anything_3")["files"][path] == 4
    assert [what for what, _ in backend_lacks("vggt")] == ["Python module vggt", "weights facebook/VGGT-1B"]


def test_a_description_follows_the_arguments():
    about = describe("inverse_dynamics", score="accuracy", granularity="chunk", weights="idm_heldout")
    assert about["range"] == [0.0, 1.0] and about["granularity"] == "chunk" and "largest" in about["formula"]
    ((path, size),) = about["files"].items()
    assert path.endswith("idm_heldout.safetensors") and size == Path(path).stat().st_size
    assert describe("inverse_dynamics")["arguments"]["floor"] == 1e-4
    with pytest.raises(ValueError, match="has no argument 'scor'; did you mean 'score'"):
        describe("inverse_dynamics", scor="accuracy")


def test_what_only_arguments_decide_is_left_open():
    about = describe("remote")
    assert about["needs"] is about["range"] is about["granularity"] is None
    assert about["arguments"]["url"] is registry.REQUIRED
    with pytest.raises(ValueError, match="requires reward"):
        describe("remote", url="http://127.0.0.1:1")


def judge(clips):
    """Mean of all. And nothing else."""
    return clips.frames.mean((1, 2, 3, 4))


def test_one_s_own_reward_is_described_by_its_docstring():
    about = declared(registry.FunctionReward(judge, "judge", {}))
    assert about["formula"] == "Mean of all" and about["range"] == [None, None] and about["cost"] == "unstated"


def test_a_missing_module_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("rewards.geometry.base.GeometricReward.modules", {"cv9": "pip install cv9"})
    assert lacking("epipolar") == [("Python module cv9", "pip install cv9")] and lacking("naive_colour") == []


@pytest.mark.parametrize(
    ("break_it", "says"), [(Path.unlink, "weights "), (lambda p: p.write_bytes(b"x"), "cannot read")]
)
def test_missing_and_damaged_weights_are_named_with_the_command_that_makes_them(monkeypatch, tmp_path, break_it, says):
    paths = {k: tmp_path / p.name for k, p in inverse_dynamics.SHIPPED.items()}
    for name, path in inverse_dynamics.SHIPPED.items():
        shutil.copy(path, paths[name])
    commands = {p: f"make {p}" for p in paths.values()}
    monkeypatch.setattr(inverse_dynamics.InverseDynamics, "files", commands)
    assert lacking("inverse_dynamics") == []
    break_it(paths["idm_heldout"])
    ((what, how),) = lacking("inverse_dynamics")
    assert says in what and str(paths["idm_heldout"]) in what and how == f"make {paths['idm_heldout']}"


def test_the_commands_that_make_the_shipped_weights_make_those(monkeypatch):
    """They say what differs from the defaults; the files say with which settings they were made."""
    import json

    from arvideo_rl.config import load
    from arvideo_rl.training.idm import IdmConfig

    for path, command in inverse_dynamics.InverseDynamics.files.items():
        made = vars(IdmConfig()) | json.loads(path.with_suffix(".json").read_text())["config"]  # keys came later
        config = vars(load(IdmConfig, None, command.split()[3:]))
        assert {k: v for k, v in config.items() if k != "out"} == {k: v for k, v in made.items() if k != "out"}
        assert Path(config["out"]) == path
