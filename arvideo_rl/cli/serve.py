"""``arvideo serve``: rewards over HTTP."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import ConfigError, check_ranges, load
from arvideo_rl.scoring.settings import Named, find_device

if TYPE_CHECKING:
    from rewards.remote.server import Served

MEMORY_KEYS = "mib or queue"
RANGES = {"port": "[0, 65535]", "queue": "[1, 1024]", "timeout": "(0, inf)", "mib": "[1, inf)", "clips": "[1, inf)"}
TOKEN = 16  # characters at least


@dataclass
class ServeRewardsConfig:
    """What ``arvideo serve rewards`` reads."""

    rewards: dict[str, Named] = field(default_factory=dict)  # rewards with arguments, by the name they are served under
    host: str = "127.0.0.1"  # address to listen at; beyond this machine only with a token
    port: int = 8100  # 0 = any free one
    token: str = ""  # name of the environment variable that holds the token clients must send
    queue: int = 8  # requests that wait while one is computed; further ones are told to come back
    timeout: float = 120.0  # seconds for an upload, and for waiting and computing
    mib: int = 1024  # largest request, packed and unpacked
    clips: int = 256  # most clips in a request
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo serve rewards REWARD ... [config.yaml] [key=value ...] [--dry-run]

Serves rewards over HTTP, for training and scoring elsewhere (target: remote, docs/serve_rewards.md). REWARD is a short
name (arvideo rewards list) or module:attribute, as it is; rewards.NAME.target and .args serve one with arguments under
a name of your choice. A YAML file holds the same keys. Ctrl-C stops. Examples:

  arvideo serve rewards inverse_dynamics epipolar
  arvideo serve rewards rewards.moves.target=inverse_dynamics rewards.moves.args.score=accuracy
  REWARDS_TOKEN=... arvideo serve rewards epipolar host=0.0.0.0 token=REWARDS_TOKEN

keys and defaults
{keys(ServeRewardsConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Serve until stopped."""
    if words[:1] != ["rewards"]:
        raise UsageError("serve takes what to serve; e.g. arvideo serve rewards inverse_dynamics")
    recipes = [w for w in words[1:] if w.lower().endswith((".yaml", ".yml"))]
    names = [w for w in words[1:] if w not in recipes]
    if len(recipes) > 1:
        raise UsageError("serve rewards takes at most one YAML file")
    config = load(ServeRewardsConfig, recipes[0] if recipes else None, items)
    parts = {**{name: Named(name) for name in names}, **config.rewards}
    if not parts:
        raise UsageError("serve rewards takes rewards; e.g. arvideo serve rewards inverse_dynamics epipolar")
    check_ranges(config, RANGES)
    token = token_of(config)
    missing = [m for m in ("starlette", "uvicorn") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"serving needs {' and '.join(missing)}; pip install 'arvideo-rl[serve]'")
    device = str(find_device(config.device))
    served = build(parts)
    with listen(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        told = f"{', '.join(served)} at {url} on {device}"
        most = (config.queue + 2) * config.mib / 1024  # those that wait, the one in hand, and that unpacked
        if "--dry-run" in flags:
            print(f"would serve {told}, holding requests of at most {most:.4g} GiB in all")
            return 0
        print(f"serving {told}; Ctrl-C stops", flush=True)
        serve(served, config, token, device, listener)
    return 0


def build(parts: dict[str, Named]) -> dict[str, Served]:
    """The rewards, loaded; ConfigError names the one that cannot be had."""
    from rewards import registry
    from rewards.remote.server import Served

    out = {}
    for name, part in parts.items():
        if not part.target:
            raise ConfigError(f"rewards.{name} has no target; e.g. rewards.{name}.target=inverse_dynamics")
        try:
            reward = registry.build(part.target, **part.args)
            registry.prepare(reward)
        except ValueError as error:
            raise ConfigError(f"rewards.{name}: {error}") from error
        arguments = ", ".join(f"{k}={v}" for k, v in sorted(part.args.items()))
        out[name] = Served(reward, f"{part.target}({arguments})")
    return out


def token_of(config: ServeRewardsConfig) -> str:
    """The token clients must send, empty for none; ConfigError when one is needed and missing."""
    if not config.token:
        if not is_loopback(config.host):
            raise ConfigError(
                f"host={config.host} can be reached from other machines: put a secret into an environment variable "
                "and name that, e.g. token=REWARDS_TOKEN"
            )
        return ""
    token = os.environ.get(config.token, "")
    if len(token) < TOKEN or not (token.isascii() and token.isprintable()):
        raise ConfigError(f"token={config.token}: that environment variable must hold {TOKEN} or more ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host``; ConfigError when there is none to be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"host={host} port={port}: {said}; choose another, port=0 takes any free one") from None


def serve(
    served: dict[str, Served], config: ServeRewardsConfig, token: str, device: str, listener: socket.socket
) -> None:
    """Answer until Ctrl-C."""
    import uvicorn

    from rewards.remote.server import Limits, application

    limits = Limits(config.queue, config.timeout, config.mib * 2**20, config.clips)
    app = application(served, limits, token, device)
    options = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
    try:
        uvicorn.Server(uvicorn.Config(app, **options, timeout_graceful_shutdown=5)).run([listener])  # type: ignore[arg-type]
    except KeyboardInterrupt:
        print("stopped")
