"""What goes over the wire: clips as an npz file, scores as JSON. Both ends read with suspicion and raise ValueError.

A zip file can unpack to a thousand times its size, and an npy header can claim any shape, so sizes are added up from
what is declared before anything is allocated. Nothing here unpickles.
"""

from __future__ import annotations

import io
import json
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from rewards.contract import RANGE_SLACK, Clips, Scores
from rewards.geometry.cameras import Cameras

PROTOCOL = 1  # of paths, fields and their meaning; both ends must speak the same
FIELDS = ("frames", "fps", "prompts", "actions", "group_ids", "chunk_starts", "c2w", "intrinsics")
DTYPES = (np.float32, np.float64, np.int64)  # and text
LARGEST = 2**16  # numbers in one entry of raw or diagnostics; larger ones (maps) are not sent
DIRECTORY = 2**14  # bytes of a zip directory; that of all fields takes a few hundred
BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError)


def pack(clips: Clips) -> bytes:
    """``clips`` as an npz file: every field that is set, exact. ValueError for cameras of an unknown kind."""
    fields: dict[str, Any] = {name: getattr(clips, name) for name in FIELDS if hasattr(clips, name)}
    if clips.cameras is not None:
        if not isinstance(clips.cameras, Cameras):
            raise ValueError(f"cameras is a {type(clips.cameras).__name__}, which cannot be sent; pass Cameras(c2w)")
        fields |= {"c2w": clips.cameras.c2w, "intrinsics": clips.cameras.intrinsics}
    if clips.prompts is not None:
        fields["prompts"] = np.array(list(clips.prompts), dtype=np.str_)
    if isinstance(clips.fps, (int, float)):
        fields["fps"] = np.float64(clips.fps)
    arrays = {
        k: v.detach().cpu().numpy() if isinstance(v, Tensor) else np.asarray(v)
        for k, v in fields.items()
        if v is not None
    }
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpack(body: bytes, limit: int) -> Clips:
    """The clips in the npz file ``body``, which may hold ``limit`` bytes unpacked. ValueError otherwise."""
    if body[-22:-18] != b"PK\5\6" or body[-42:-38] == b"PK\6\7":  # the end of a zip file without comment or zip64
        raise ValueError("the body is not an npz file; write it with numpy.savez")
    entries, directory = struct.unpack("<HL", body[-12:-6])
    if entries > len(FIELDS) or directory > DIRECTORY:
        raise ValueError(f"the npz file has {entries} entries; it may hold {', '.join(FIELDS)}, each once")
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in FIELDS or name in arrays:
                    raise ValueError(f"the npz file holds {name[:40]!r}; it may hold {', '.join(FIELDS)}, each once")
                if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{name} is packed in a way that numpy does not write; write it with numpy.savez")
                limit -= info.file_size
                if limit < 0:
                    raise ValueError(f"{name} makes the clips larger than the server takes; send fewer or smaller ones")
                try:
                    with archive.open(info) as file:
                        arrays[name] = _array(file, info.file_size)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
    except BROKEN as error:
        raise ValueError(f"the npz file is damaged ({type(error).__name__}); write it with numpy.savez") from None
    return _clips(arrays)


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """The array in an npy ``file`` of ``size`` bytes."""
    reader = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
    if reader is None:
        raise ValueError("its npy version is neither 1.0 nor 2.0")
    shape, fortran, dtype = reader(file)
    native = dtype.newbyteorder("=")
    if native not in DTYPES and dtype.kind != "U":
        raise ValueError(f"it is {dtype.name}; send float32, float64, int64 or text")
    count = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or count != size - file.tell():
        raise ValueError(f"shape {shape} takes {count} bytes, but {size - file.tell()} were sent")
    data = bytearray(file.read(count))
    if len(data) != count:
        raise ValueError(f"it ends after {len(data)} of {count} bytes")
    if dtype.kind == "U" and (np.frombuffer(data, f"{dtype.byteorder}u4") > sys.maxunicode).any():
        raise ValueError("it holds what is no character")
    array = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    return array if dtype.kind == "U" else array.astype(native, copy=False)


def _clips(arrays: Mapping[str, np.ndarray]) -> Clips:
    if "frames" not in arrays:
        raise ValueError("the npz file holds no frames; send frames, float32 [B, T, 3, H, W] in [0, 1]")
    rest: dict[str, Any] = {}
    for name, array in arrays.items():
        if (array.dtype.kind == "U") != (name == "prompts"):
            raise ValueError(f"{name} is {array.dtype.name}; prompts are text, everything else is numbers")
        rest[name] = array.tolist() if name == "prompts" else torch.from_numpy(array)
    c2w, intrinsics, starts, fps = (rest.pop(k, None) for k in ("c2w", "intrinsics", "chunk_starts", "fps"))
    prompts = rest.get("prompts", [])
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise ValueError("prompts must be a list of texts, one for each clip")
    if starts is not None:
        if starts.ndim != 1 or starts.dtype != torch.int64:
            raise ValueError(f"chunk_starts is {starts.dtype} {list(starts.shape)}; send int64 [K]")
        rest["chunk_starts"] = tuple(starts.tolist())
    if c2w is not None:
        rest["cameras"] = Cameras(c2w, intrinsics)
    return Clips(fps=fps.item() if fps is not None and fps.ndim == 0 else fps, **rest)


def plain(value: Any) -> Any:
    """``value`` in strict JSON: tensors as nested lists, NaN as null, infinities as "inf" and "-inf". TypeError for
    what JSON has no word for."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def answer(scores: Scores) -> dict[str, Any]:
    """``scores`` in strict JSON. float32 values come back exactly; large or foreign entries of raw and diagnostics are
    left out."""
    parts: dict[str, Any] = {"value": plain(scores.value), "reasons": list(scores.reasons)}
    parts["components"] = {k: plain(v.float()) for k, v in scores.components.items()}
    for name in ("raw", "diagnostics"):
        parts[name] = {}
        for key, value in getattr(scores, name).items():
            try:
                if not (isinstance(value, Tensor) and value.numel() > LARGEST):
                    parts[name][str(key)] = plain(value)
            except TypeError:
                continue
    return parts


def parse(text: bytes) -> dict[str, Any]:
    """The JSON object ``text``, strictly. ValueError otherwise."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        data = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        start = text[:40].decode("utf-8", "replace")
        raise ValueError(f"it is no JSON ({' '.join(str(error).split())}); it begins {start!r}") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}, not an object")
    return data


def scores_of(data: Mapping[str, Any], shape: tuple[int, ...], limits: tuple[float, float]) -> Scores:
    """The scores of clips in an answer: of ``shape`` [B] or [B, K], and within ``limits``. ValueError otherwise."""
    value = _numbers("value", data.get("value"))
    if tuple(value.shape) != shape:
        raise ValueError(f"value has shape {list(value.shape)}, not {list(shape)}")
    low, high = (x + s * RANGE_SLACK for x, s in zip(limits, (-1, 1)))
    outside = value[(value < low) | (value > high)]
    if len(outside):
        declared = f"{limits[0]:.6g} to {limits[1]:.6g}"
        raise ValueError(f"value {float(outside[0]):.6g} is not in the declared range {declared}")
    reasons = data.get("reasons")
    if not isinstance(reasons, list) or not all(r is None or isinstance(r, str) for r in reasons):
        raise ValueError("reasons is not a list of texts and nulls")
    named = {k: data.get(k, {}) for k in ("components", "raw", "diagnostics")}
    if wrong := [k for k, v in named.items() if not isinstance(v, dict)]:
        raise ValueError(f"{wrong[0]} is not an object")
    components = {k: _numbers(f"components.{k}", v) for k, v in named["components"].items()}
    raw, diagnostics = ({k: _tensor(v) for k, v in named[name].items()} for name in ("raw", "diagnostics"))
    return Scores(value, ~value.isnan(), reasons, components, raw, diagnostics)


def _numbers(name: str, value: Any) -> Tensor:
    """Nested lists of numbers as float32. ValueError for anything else."""
    found = _tensor(value)
    if not isinstance(found, Tensor) or found.dtype == torch.bool:
        raise ValueError(f"{name} is not a list of numbers and nulls")
    return found.float()


def _tensor(value: Any) -> Any:
    """Nested lists of numbers as a tensor, anything else as it is."""

    def number(x: Any) -> Any:
        if isinstance(x, list):
            return [number(v) for v in x]
        return {None: math.nan, "inf": math.inf, "-inf": -math.inf}.get(x, x) if isinstance(x, (str, type(None))) else x

    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(number(value))
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return value
