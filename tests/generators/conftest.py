"""What the tests of generators share."""

import pytest
import torch

from arvideo_rl.generators.context import Context
from samplers.schedule import warped_levels


@torch.no_grad()
def make_roll_by_hand(model, g, read, chunks=8, adjacent=False):
    """Latents [1, F, C, H, W] of chunks of 3 frames from the golden noise, with neither window, denoiser nor stream:
    ``read(frames)`` lists the spans that the next chunk reads, from the clean frames so far, one span each."""
    levels, frames, out = warped_levels((1000, 750, 500, 250), 5), [], []
    for k in range(chunks):
        context = Context(tuple(read(frames)), 3 * k, text=g["text"], adjacent=adjacent)
        x = g["noise"][:, 3 * k : 3 * k + 3]
        for step, level in enumerate(levels):
            if step:
                x = (1 - level) * x + level * g["renoise"][3 * k + step - 1]
            x = model(x, torch.full((1,), level), context).x0
        span = model(x, torch.zeros(1), context, write=True).span
        frames += [span.crop(f, f + 1) for f in range(span.start, span.stop)]
        out.append(x)
    return torch.cat(out, 1)


@pytest.fixture(scope="session")
def roll_by_hand():
    """The function :func:`make_roll_by_hand`."""
    return make_roll_by_hand
