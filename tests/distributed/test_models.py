"""Models of transformers, and PyTorch's own context parallel, with sequences in parts."""

import importlib.util

import models
import pytest
import scenarios

pytestmark = pytest.mark.xdist_group("distributed")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@needs_transformers
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_model_on_two_ranks_is_the_model_on_one(pool, kind):
    for logits, grads in pool.run(2, models.differences, kind):
        assert logits < 1e-5
        assert grads < 1e-5


@needs_transformers
def test_padding_is_refused(pool):
    for said in pool.run(2, models.padded):
        assert said == "attention_mask: padding with a split sequence is not implemented"


def test_buffers_of_pytorchs_context_parallel(pool):
    for error in pool.run(2, scenarios.in_context_parallel, 2):
        assert error < 1e-5
