"""pyfa inside other libraries, each asked for by its own ``register()``.

``transformers``: models with ``attn_implementation="pyfa"``. ``diffusers``: models with
``set_attention_backend("pyfa")``. ``torch_sdpa``: PyTorch's
``scaled_dot_product_attention``. Import what you need; ``import pyfa`` loads none of it.
"""
