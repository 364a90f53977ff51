"""Words become vectors, padding is zero, and a prompt that cannot be read is refused with its words."""

import pytest
import torch

from arvideo_rl.generators.text import WordEncoder


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return WordEncoder(words=("a", "ball", "blue", "cube", "red"), length=5, dim=16, heads=2).eval()


@torch.no_grad()
def test_vectors_past_the_true_length_are_zero(encoder):
    out = encoder(encoder.tokens(["a red ball", "a blue"]))
    assert out.shape == (2, 5, 16)
    assert (out[0, 3:] == 0).all() and (out[1, 2:] == 0).all()
    assert (out[0, :3] != 0).any(-1).all() and (out[1, :2] != 0).any(-1).all()


@torch.no_grad()
def test_a_prompt_does_not_depend_on_what_is_batched_with_it(encoder):
    alone = encoder(encoder.tokens(["a red"]))
    beside = encoder(encoder.tokens(["a red", "a blue cube red ball"]))[:1]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_padding_is_never_attended_to(encoder):
    tokens = encoder.tokens(["a red"])
    before = encoder(tokens)
    encoder.embedding.weight[0] += 5
    assert torch.equal(encoder(tokens), before)


@torch.no_grad()
def test_the_order_of_words_matters(encoder):
    a, b = encoder(encoder.tokens(["red ball blue cube", "blue ball red cube"]))
    assert (a[1] - b[1]).abs().max() > 1e-4


@torch.no_grad()
def test_evaluation_and_training_mode_give_the_same_vectors(encoder):
    tokens = encoder.tokens(["a red ball"])
    torch.testing.assert_close(encoder(tokens), encoder.train()(tokens), rtol=0, atol=1e-5)


def test_case_commas_and_stops_are_ignored(encoder):
    assert torch.equal(encoder.tokens(["A red, BALL."]), encoder.tokens(["a red ball"]))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a rad ball", ("'rad'", "did you mean 'red'?", "a ball blue cube red")),
        ("a zzzz", ("'zzzz'", "known words", "a ball blue cube red")),
        ("a a a a a a", ("'a a a a a a'", "6 words", "1 to 5")),
        (" , ", ("0 words", "1 to 5")),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt, words, encoder):
    with pytest.raises(ValueError) as error:
        encoder.tokens([prompt])
    assert all(word in str(error.value) for word in words), error.value
