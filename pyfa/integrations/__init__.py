"""pyfa inside other libraries. Integrations are opt-in; ``import pyfa`` loads none of them.

``transformers``: models with ``attn_implementation="pyfa"``. ``diffusers``: models with
``set_attention_backend("pyfa")``. ``vllm``: an attention backend of vLLM. ``sglang``: an attention
backend of SGLang. ``megatron``, ``torchtitan``: attention modules for their configs.
``torch_sdpa``: PyTorch's ``scaled_dot_product_attention``. ``flex``: PyTorch's ``flex_attention``.
"""
