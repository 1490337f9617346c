"""A slow float64 version of every attention, straight from its equations: a module a name, each with

``oracle(params, x, real, n_heads, options, causal, layer_idx) -> y (B, T, D), weights (B, H, T, T) or None``.

Nothing of the code that they judge is called.
"""
