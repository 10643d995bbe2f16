"""mmflash_jax: speculative decoding for vision-language models, in pure functional JAX."""

__version__ = "0.1.0"
