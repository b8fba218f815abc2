"""xspec: an LLM engine whose point is adaptive speculative decoding. Importing it loads no torch."""

__version__ = "0.1.0"
