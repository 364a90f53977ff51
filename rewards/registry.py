"""Find and build a reward by name: a short name below, or ``module:attribute`` for one's own.

A class is built with the arguments; a function is the reward itself, called as ``function(clips, **args)`` and giving a
float tensor [B] or :class:`Scores`. What a function needs is declared beside it: ``function.needs = {"actions"}``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from rewards.contract import Clips, Reward, Scores

REWARDS = {
    "aesthetic": "rewards.preference.clip:Aesthetic",
    "brisque": "rewards.brisque:Brisque",
    "camera_following": "rewards.geometry.scores:CameraFollowing",
    "camera_smoothness": "rewards.geometry.scores:CameraSmoothness",
    "clip_score": "rewards.preference.clip:ClipScore",
    "dynamic_degree": "rewards.motion:DynamicDegree",
    "epipolar": "rewards.geometry.scores:Epipolar",
    "flicker": "rewards.motion:Flicker",
    "four_d": "rewards.four_d.reward:FourD",
    "hpsv2": "rewards.preference.clip:HPSv2",
    "hpsv3": "rewards.preference.hpsv3:HPSv3",
    "inverse_dynamics": "rewards.inverse_dynamics:InverseDynamics",
    "judge": "rewards.preference.judge:Judge",
    "motion_smoothness": "rewards.motion:MotionSmoothness",
    "naive_colour": "rewards.naive_colour:naive_colour",  # an example of what goes wrong
    "pickscore": "rewards.preference.clip:PickScore",
    "remote": "rewards.remote.client:Remote",
    "reprojection": "rewards.geometry.scores:Reprojection",
    "rerender": "rewards.geometry.scores:Rerender",
    "sharpness": "rewards.sharpness:sharpness",
    "text_video": "rewards.text_video:TextVideo",
    "video_reward": "rewards.preference.video_reward:VideoReward",
}


class FunctionReward:
    """A bare function ``clips -> Tensor [B]`` (or Scores) as a reward; its attributes declare what a class's would."""

    def __init__(self, function: Callable[..., Tensor | Scores], name: str, args: Mapping[str, Any]):
        self.function, self.name, self.args = function, name, dict(args)
        self.needs: frozenset[str] = frozenset(getattr(function, "needs", ()))
        self.granularity: str = getattr(function, "granularity", "clip")
        self.value_range: tuple[float, float] = getattr(function, "value_range", (float("-inf"), float("inf")))
        self.licence: str = getattr(function, "licence", "unstated")
        self.hacked_by: str = getattr(function, "hacked_by", "unstated")
        self.differentiable: bool = getattr(function, "differentiable", False)
        if hasattr(function, "maps"):
            self.maps = partial(function.maps, **self.args)

    def __call__(self, clips: Clips) -> Scores:
        try:
            out = self.function(clips, **self.args)
        except (ArithmeticError, AttributeError, LookupError, NameError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"reward {self.name!r} failed ({said}); mend the function") from error
        return out if isinstance(out, Scores) else Scores(out)


REQUIRED = inspect.Parameter.empty


def arguments(found: Any) -> dict[str, Any]:
    """The arguments that a class or function takes as a reward, with their defaults or REQUIRED."""
    if not isinstance(found, type) and not inspect.isroutine(found):
        return {}
    listed = list(inspect.signature(found).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in (listed if isinstance(found, type) else listed[1:]) if p.kind in kinds}


def available() -> tuple[str, ...]:
    """The short names, sorted."""
    return tuple(sorted(REWARDS))


def build(target: str, /, **args: Any) -> Reward:
    """Build the reward ``target`` (a short name or ``module:attribute``) with ``args``.

    Raises ValueError, in one line, for an unknown name, a module or attribute that is not there, and arguments that the
    signature does not take or misses.
    """
    found = resolve(target)
    if isinstance(found, type):
        check_arguments(target, inspect.signature(found), args)
        try:
            reward: Reward = found(**args)
        except TypeError as error:  # mostly an argument of the wrong type
            given = ", ".join(f"{k}={v}" for k, v in args.items()) or "no arguments"
            raise ValueError(f"reward {target!r} cannot be built with {given}: {error}") from error
        lacks = [x for x in ("name", "needs", "granularity") if not hasattr(reward, x)]
        if lacks or not callable(reward):
            what = ", ".join(lacks) or "__call__"
            raise ValueError(
                f"reward {target!r} lacks {what}; a reward class has name, needs, granularity and __call__"
            )
        return reward
    if inspect.isroutine(found):
        signature = inspect.signature(found)
        rest = list(signature.parameters.values())[1:]  # the first parameter receives the clips
        check_arguments(target, signature.replace(parameters=rest), args)
        return FunctionReward(found, target, args)
    if not callable(found) or not hasattr(found, "needs"):
        raise ValueError(f"reward {target!r} is a {type(found).__name__}; name a class, a function or a reward object")
    if args:
        raise ValueError(f"reward {target!r} is built already and takes no arguments; got {', '.join(args)}")
    return found


def prepare(reward: Any) -> None:
    """Let ``reward`` (or a backend) load what it would load late, if it has such a thing; ValueError when it cannot."""
    load = getattr(reward, "prepare", None)
    if load is not None:
        load()


def resolve(target: str, known: Mapping[str, str] = REWARDS, kind: str = "reward") -> Any:
    """The class or function that ``target`` names, one of ``known`` or module:attribute; ValueError when there is none.
    ``kind`` says in messages what it was to be."""
    path = known.get(target, target)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(f"{kind} {target!r} is unknown{_nearest(target, known)}; known: {', '.join(sorted(known))}, "
                         "or module:attribute for your own")  # fmt: skip
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            missing = f"{module!r} imports {error.name!r}, which is not installed"
            raise ValueError(f"{kind} {target!r}: {missing}; pip install it") from error
        where = "on the Python path or in the working directory"
        raise ValueError(f"{kind} {target!r}: there is no module {error.name!r} {where}") from None
    except Exception as error:  # whatever the module does when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{kind} {target!r}: {module!r} cannot be imported ({said}); mend it") from error
    if not hasattr(home, attribute):
        raise ValueError(f"{kind} {target!r}: {module!r} has no {attribute!r}{_nearest(attribute, dir(home))}")
    return getattr(home, attribute)


def check_arguments(target: str, signature: inspect.Signature, args: Mapping[str, Any],
                    kind: str = "reward") -> None:  # fmt: skip
    """Raise ValueError for an argument that ``signature`` does not take, or one it requires and ``args`` lacks.
    ``kind`` says in messages what it is."""
    parameters = signature.parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in args:
            if name not in names:
                hint = f"{_nearest(name, names)}; it takes: {', '.join(names) or 'none'}"
                raise ValueError(f"{kind} {target!r} has no argument {name!r}{hint}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in args]
    if missing:
        raise ValueError(f"{kind} {target!r} requires {', '.join(missing)}; add to its args")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
