"""Joint denoising: one chunk is plain streaming, and every chunk is visited at every level exactly once."""

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.rolling import rolling
from samplers.stream import draw_from, stream

LEVELS = (1.0, 0.9, 0.8, 0.6, 0.4)
SHAPE = (3, 3, 4, 4)
WINDOW = Window(3, 9, 3)


def make(tiny, randn, texts=1):
    script = Script(tuple((6 * i, randn(2, 5, 8)) for i in range(texts)), torch.arange(2 * 30).view(2, 30) % 6)
    return Denoiser(tiny(places=(3, 2, 2)), WINDOW, script)


def test_one_chunk_is_plain_streaming(tiny, randn):
    denoiser, draw = make(tiny, randn), draw_from([Key(1), Key(2)], SHAPE)
    (one,), (other,) = (list(f(denoiser, WINDOW.chunks(3), LEVELS, draw)) for f in (stream, rolling))
    torch.testing.assert_close(one.latents, other.latents, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.context.spans[0].keys[1], other.context.spans[0].keys[1], rtol=0, atol=1e-6)


class Mock:
    """Counts what is asked; its prediction is its input."""

    def __init__(self):
        self.forwards, self.committed, self.entered = [], 0, []

    def start(self):
        return 0

    def enter(self, context, stop=None):
        self.entered.append((context, stop))
        return context

    def denoise(self, x, t, context):
        frames = x[0, :, 0, 0, 0]
        self.forwards.append([(int(f), round(float(s), 3)) for f, s in zip(frames[::3], t[::3])])
        assert len(t) == x.shape[1] and (t.view(-1, 3) == t.view(-1, 3)[:, :1]).all()
        return x

    def refresh(self, x0, context):
        return context + 3


def ones(chunk, step, purpose):
    """Chunk k is the number k wherever it is, so that it can be followed."""
    return torch.full((1, *SHAPE), float(chunk))


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_every_chunk_is_visited_at_every_level_once_oldest_cleanest(count, monkeypatch):
    monkeypatch.setattr("samplers.rolling.consistency", lambda x0, s: (x0, 0.0))
    mock = Mock()
    out = list(rolling(mock, WINDOW.chunks(3 * count), LEVELS, ones))
    assert [c.index for c in out] == list(range(count)) and [c.context for c in out] == [
        3 * (k + 1) for k in range(count)
    ]
    visits = [v for forward in mock.forwards for v in forward]
    assert sorted(visits) == sorted((k, t) for k in range(count) for t in LEVELS)
    for w, forward in enumerate(mock.forwards):
        assert [k for k, _ in forward] == list(range(max(0, w - 4), min(count, w + 1)))
        assert forward == sorted(forward) and [t for _, t in forward] == sorted(t for _, t in forward)
    assert len(mock.forwards) == count + 4


def test_each_draw_is_made_once_and_the_same_stream_comes_out_in_any_batch(tiny, randn):
    denoiser = make(tiny, randn, texts=2)
    seen = []

    def draw(chunk, step, purpose):
        seen.append((chunk, step, purpose))
        return draw_from([Key(1), Key(2)], SHAPE)(chunk, step, purpose)

    whole = torch.cat([c.latents for c in rolling(denoiser, WINDOW.chunks(12), LEVELS, draw)], 1)
    assert len(set(seen)) == len(seen) == 4 * len(LEVELS)
    alone = Denoiser(denoiser.model, WINDOW, denoiser.script.rows(slice(1, 2)))
    one = torch.cat([c.latents for c in rolling(alone, WINDOW.chunks(12), LEVELS, draw_from([Key(2)], SHAPE))], 1)
    torch.testing.assert_close(one[0], whole[1], rtol=0, atol=1e-5)


def test_a_last_chunk_is_trimmed_and_unequal_chunks_are_refused(tiny, randn):
    draw = draw_from([Key(1), Key(2)], SHAPE)
    out = list(rolling(make(tiny, randn), WINDOW.chunks(8), LEVELS, draw, frames=8))
    assert [c.latents.shape[1] for c in out] == [3, 3, 2]
    with pytest.raises(ValueError, match="chunks of one size"):
        list(rolling(make(tiny, randn), [(0, 1), (1, 4)], LEVELS, draw))


def test_the_window_counts_the_frames_in_work():
    """Rolling Forcing's window of 21 frames holds the 15 that are denoised together."""
    from arvideo_rl.generators.streaming import Streaming

    settings = Streaming(3, 21, 3, steps=(1000.0, 800.0, 600.0, 400.0, 200.0), shift=5.0, joint=True, first_alone=False)
    window = settings.attention_window()
    assert window.work == 15 and window.chunks(6) == [(0, 3), (3, 6)]
    context = window.start()
    for k in range(8):
        x = torch.zeros(1, 3, 1, 12)
        context = window.commit(context, Span(3 * k, 3 * k + 3, (x,), (x,)))
        assert len(context.held()) + 15 <= 21
    assert context.held() == (0, 1, 2, 21, 22, 23)
    with pytest.raises(
        ValueError, match=r"window of 12 frames cannot hold sink 3 \+ frames in work 15; set window to 18"
    ):
        Streaming(3, 12, 3, steps=settings.steps, joint=True).attention_window()
    with pytest.raises(ValueError, match="joint denoising needs chunks of one size"):
        Streaming(joint=True, first_alone=True)
