"""The constants of the 4D reward: measured on clips that are known to be good, kept in a file that says where they came
from, and refused where they do not belong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewards.four_d.observe import FEATURES, Observed, Settings

VERSION = 1  # raise it whenever the same clip is measured differently
FEWEST = 64  # clips below which constants are shaky
NATURAL_RIGID = 0.7  # value of rigid for a median clip, which sets k
NATURAL_RECON = 0.6  # what the colour error alone leaves of recon for a median clip, which sets tau
SIZES, TIMES = 1.5, 1.1  # how far, as a factor, clips may lie outside the calibrated short sides and time steps


@dataclass(frozen=True)
class Calibration:
    """Constants, what they are good for, and where they came from. Raises ValueError for numbers that cannot be."""

    m_nat: float  # natural speed of what moves by itself, in the unit of Observed.m
    sigma: float  # how far from it is still natural
    k: float  # seconds; how much stretching counts
    tau: float  # colour error, over contrast, at which recon is 1/e
    loose: float  # natural share of the picture that one solid world does not explain
    features: tuple[float, ...] = ()  # median of each of FEATURES; empty without an anchor
    spread: tuple[float, ...] = ()  # 1.4826 MAD of each
    backend: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    short_side: tuple[int, int] = (1, 2**31)  # of the clips measured, pixels
    time_step: tuple[float, float] = (0.0, math.inf)  # between compared frames, seconds
    m_range: tuple[float, float] = (0.0, math.inf)  # lowest and highest m of a window
    measured: dict[str, Any] = field(default_factory=dict)  # statistics, for the reader
    source: dict[str, Any] = field(default_factory=dict)  # clips, command, date, for the reader
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("m_nat", "sigma", "k", "tau"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it is a positive number")
        if self.sigma > 0.5001 * self.m_nat:
            passing = "at most half of it, or a clip in which nothing moves would pass the gate"
            raise ValueError(f"sigma is {self.sigma:g} for an m_nat of {self.m_nat:g}; {passing}")
        if not 0 <= self.loose <= 1:
            raise ValueError(f"loose is {self.loose}; it is a share, from 0 to 1")
        if {len(self.features), len(self.spread)} not in ({0}, {len(FEATURES)}) or not all(s > 0 for s in self.spread):
            raise ValueError(f"features and spread must be {len(FEATURES)} numbers each, the spread above 0")
        if not all(math.isfinite(x) for x in (*self.features, *self.spread)):
            raise ValueError("features or spread hold what is no finite number")
        for name in ("short_side", "time_step", "m_range"):
            low, high = getattr(self, name)
            if not low <= high:
                raise ValueError(f"{name} is {low} to {high}; the lower one comes first")

    @property
    def floor(self) -> float:
        """Speed below which nothing moves."""
        return max(self.m_nat - 2 * self.sigma, 0.1 * self.m_nat)

    def check_reward(self, backend: str, settings: Settings) -> None:
        """ValueError unless it was made with this backend and these settings."""
        made = {"backend": self.backend, **self.settings}
        for key, used in {"backend": backend, **asdict(settings)}.items():
            if (had := made.get(key)) != used:
                raise ValueError(f"made with {key}={had}, used with {key}={used}; calibrate again, or use {had}")

    def check_clips(self, short_side: int, time_step: float) -> None:
        """ValueError unless clips are about as large, and their frames as far apart, as those measured."""
        low, high = self.short_side
        if not low / SIZES <= short_side <= high * SIZES:
            raise ValueError(f"made with clips of {low} to {high} pixels on the short side, these have {short_side}")
        first, last = self.time_step
        if not first / TIMES <= time_step <= last * TIMES:
            seen = f"frames {first:.3g} to {last:.3g} s apart, these are {time_step:.3g} s"
            raise ValueError(f"made with {seen} apart; choose step, or calibrate again")

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


BY_HAND = ("m_nat", "sigma", "k", "tau", "loose")
# of the embedded world at 96 x 96, to begin with
UNCALIBRATED = Calibration(m_nat=0.07, sigma=0.035, k=0.37, tau=0.18, loose=0.05)
SHIPPED = {"four_d_tiny": Path(__file__).parents[1] / "weights" / "four_d_tiny.json"}  # of the tiny generator's clips


def read(path: str | Path) -> Calibration:
    """The calibration in ``path``, a file or one of SHIPPED; ValueError in one line for anything else."""
    if str(path) in SHIPPED and Path(path).exists():
        raise ValueError(f"calibration {path}: is shipped, and a file here is called so too; say ./{path} for the file")
    try:
        data = json.loads(SHIPPED.get(str(path), Path(path)).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        how = f"arvideo rewards calibrate makes one; shipped: {', '.join(SHIPPED)}"
        raise ValueError(f"calibration {path}: cannot be read ({error.strerror}); {how}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"calibration {path}: is not JSON ({' '.join(str(error).split())})") from None
    known = {f.name for f in fields(Calibration)}
    if not isinstance(data, dict) or data.keys() != known:
        odd = ", ".join(sorted(set(data) ^ known)) if isinstance(data, dict) else "not an object"
        raise ValueError(f"calibration {path}: is none of arvideo rewards calibrate ({odd} missing or unknown)")
    if data["version"] != VERSION:
        raise ValueError(f"calibration {path}: is of version {data['version']}, not {VERSION}; calibrate again")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    try:
        return Calibration(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"calibration {path}: {error}") from None


def calibrated(observed: Sequence[Observed], backend: str, settings: Settings, short_sides: Sequence[int],
               time_steps: Sequence[float], source: dict[str, Any]) -> Calibration:  # fmt: skip
    """Constants from the measurements of good clips: m_nat their median m, sigma 1.4826 MAD between a quarter and a
    half of it, k such that a median clip has a rigid of 0.7, tau such that its colours leave it a recon of 0.6, loose
    the 95 % quantile. ValueError when nothing moves in them."""
    m, stretch = torch.cat([o.m for o in observed]), torch.cat([o.stretch for o in observed])
    m_nat, stretched = float(m.quantile(0.5)), float(stretch.quantile(0.5))
    if m_nat <= 1e-4 or stretched <= 0:
        raise ValueError(f"nothing moves by itself in these {len(observed)} clips (median m {m_nat:.2g}); give others")
    sigma = min(max(1.4826 * float((m - m_nat).abs().quantile(0.5)), 0.25 * m_nat), 0.5 * m_nat)
    features = torch.stack([o.features for o in observed])
    middle = features.quantile(0.5, 0)
    away = 1.4826 * (features - middle).abs().quantile(0.5, 0)
    error, unexplained = (torch.cat([getattr(o, key) for o in observed]) for key in ("recon_error", "unexplained"))
    measured = {
        "m": statistics(m), "stretch": statistics(stretch),
        "smooth_ratio": statistics(torch.cat([o.change / o.m.clamp_min(1e-6) for o in observed])),
        **{key: statistics(torch.cat([getattr(o, key) for o in observed]))
           for key in ("camera_speed", "recon_error", "unexplained", "background", "followed")},
        "m_nat_95": _bootstrap([o.m for o in observed]),
    }  # fmt: skip
    return Calibration(
        m_nat, sigma, -2 * math.log(NATURAL_RIGID) / stretched,
        max(float(error.quantile(0.5)), 1e-3) / -math.log(NATURAL_RECON), float(unexplained.quantile(0.95)),
        tuple(middle.tolist()), tuple(away.clamp_min(0.02).tolist()), backend, asdict(settings),
        (min(short_sides), max(short_sides)), (min(time_steps), max(time_steps)), (float(m.min()), float(m.max())),
        measured, source,
    )  # fmt: skip


def statistics(values: Tensor) -> dict[str, float]:
    """What a reader wants to know of ``values`` [N]."""
    low, middle, high = values.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    spread = float(values.std(correction=0))
    mad = float((values - middle).abs().quantile(0.5))
    return {"mean": float(values.mean()), "std": spread, "q05": low, "median": middle, "q95": high, "mad": mad}


def _bootstrap(groups: Sequence[Tensor], draws: int = 400) -> list[float]:
    """95 % interval of the median of all numbers in ``groups``, drawn group by group, always with one seed."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(groups), (draws, len(groups)), generator=generator).tolist()
    medians = torch.stack([torch.cat([groups[i] for i in row]).quantile(0.5) for row in picks])
    return medians.quantile(torch.tensor([0.025, 0.975])).tolist()
