"""pyfa inside other libraries. Integrations are opt-in; ``import pyfa`` loads none of them.

``transformers``: models with ``attn_implementation="pyfa"``. ``torch_sdpa``: PyTorch's
``scaled_dot_product_attention``.
"""
