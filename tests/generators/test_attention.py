"""Attention kernels are chosen by name, tried before use, and refused with the reason."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from arvideo_rl.generators import attention
from arvideo_rl.generators.attention import BACKENDS, attempt, choose
from arvideo_rl.generators.context import Context
from arvideo_rl.generators.pretrained import stored_dtype

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", ["native", "math", "flex"])
@torch.no_grad()
def test_every_kernel_that_torch_brings_gives_the_same_video(name, tiny, randn):
    model, x, t, context = tiny(), randn(2, 3, 3, 4, 4), torch.tensor([0.9, 0.2]), Context(text=randn(2, 5, 8))
    plain = model(x, t, context).x0
    said = choose(model, name)
    assert model.attention == BACKENDS[name][0] and said.startswith(f"attention {name} (torch")
    torch.testing.assert_close(model(x, t, context).x0, plain, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_chosen_kernel_is_the_one_that_runs(tiny, randn, monkeypatch):
    from arvideo_rl.generators import transformer

    model, used, original = tiny(), [], transformer.dispatch_attention_fn

    def spy(*tensors, backend=None, **rest):
        used.append(backend)
        return original(*tensors, backend=backend, **rest)

    monkeypatch.setattr(transformer, "dispatch_attention_fn", spy)
    choose(model, "math")
    model(randn(1, 3, 3, 4, 4), torch.tensor([0.9]), Context(text=randn(1, 5, 8)))
    assert set(used) == {AttentionBackendName._NATIVE_MATH} and len(used) == 4  # two blocks, self and cross


def test_what_is_not_installed_or_unknown_is_refused_with_the_way_out(tiny):
    with pytest.raises(ValueError, match=r"attention=sage does not work on cpu in float32: .*install `sageattention"):
        choose(tiny(), "sage")
    with pytest.raises(ValueError, match="attention=falsh: unknown; choose one of native, math"):
        choose(tiny(), "falsh")


def test_a_kernel_without_gradients_is_refused_for_training(tiny):
    with pytest.raises(ValueError, match="attention=flex does not work on cpu in float32: .*backward"):
        choose(tiny(), "flex", trains=True)


@pytest.mark.parametrize("name", ["native", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_weakened_pasts_are_tried_where_they_are_needed(name, dtype):
    assert 0 < attempt(name, CPU, dtype, 32, trains=True, masked=True) < 1e-2


def test_what_is_tried_is_the_dtype_that_attends(tiny):
    """Loading a model in bfloat16 leaves norms and others in float32."""
    model = tiny()
    for key, p in model.named_parameters():
        p.data = p.data.to(stored_dtype(key, torch.bfloat16))
    assert next(model.parameters()).dtype == torch.float32 and "bfloat16 on cpu" in choose(model, "native")


@pytest.mark.parametrize("fault", ["scaled", "unmasked"])
def test_a_kernel_that_computes_something_else_is_refused(fault, tiny, monkeypatch):
    original = attention.dispatch_attention_fn

    def wrong(q, k, v, attn_mask=None, backend=None):
        if fault == "scaled":
            return 1.01 * original(q, k, v, attn_mask=attn_mask, backend=backend)
        return original(q, k, v, backend=backend)

    monkeypatch.setattr(attention, "dispatch_attention_fn", wrong)
    with pytest.raises(ValueError, match="attention=native on cpu is off by .* of exact attention; allowed 0.0001"):
        choose(tiny(), "native", masked=True)
